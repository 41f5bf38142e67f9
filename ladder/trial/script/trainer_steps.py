"""Timing micro-steps of the Trainer of a script."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from transformers import Trainer

from ladder.events.step_policy import CandidateSpec
from ladder.trial.model import set_checkpointing
from ladder.trial.script.hold import Grip
from ladder.trial.script.samples import Samples
from ladder.trial.subject import Kind, Subject
from ladder.trial.techniques import begin_candidate, divides_gradients, techniques_of


def _clip(trainer: Trainer) -> None:
    """As the Trainer's own loop does; it has had a method for that since transformers 5."""
    model = trainer.model_wrapped
    if hasattr(trainer, "_clip_grad_norm"):
        trainer._get_grad_norm(model, grad_norm=trainer._clip_grad_norm(model))
        return
    norm = trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    if trainer.is_deepspeed_enabled and hasattr(norm, "item"):
        norm.item()


class TrainerSubject(Subject):
    """Micro-steps through the `training_step` of the script's own Trainer, on batches of its own samples."""

    def __init__(self, trainer: Trainer, grip: Grip) -> None:
        self._trainer, self._grip = trainer, grip
        self._loader = trainer.callback_handler.train_dataloader
        self._samples = self._look_at_samples()
        self.is_even = self._samples.are_alike
        self._batches: dict[tuple[int, Kind], Any] = {}
        accumulation = grip.spec.deepspeed["gradient_accumulation_steps"]
        trainer.current_gradient_accumulation_steps = accumulation
        self._accumulation = accumulation

    def _look_at_samples(self) -> Samples:
        return Samples(self._loader, known=self._grip.known_sizes)

    @property
    def skipped_steps(self) -> int:
        return int(getattr(self._trainer.model_wrapped, "skipped_steps", 0))

    def use(self, candidate: CandidateSpec) -> None:
        self._batches.clear()
        begin_candidate(techniques_of(self._grip.spec))
        if len(self._grip.spec.candidates) > 1:  # a single one has what the Trainer's own arguments say
            set_checkpointing(self._trainer.model, candidate)

    def share_of_new_lengths(self, candidate: CandidateSpec) -> float:
        return self._samples.share_of_new_lengths(candidate.micro_batch)

    def draw(self, candidate: CandidateSpec, kind: Kind) -> tuple[Any, Any]:
        key = (candidate.micro_batch, kind)
        if key not in self._batches or kind == "new":
            self._batches[key] = self._samples.batch(candidate.micro_batch, kind)
        batch = copy.copy(self._batches[key])  # a script may take things out of it
        trainer = self._trainer
        # Before transformers 4.50 it asks for no device.
        given = (iter([batch]), 1, trainer.args.device)[: len(signature(trainer.get_batch_samples).parameters)]
        (batch,), items = trainer.get_batch_samples(*given)
        return batch, None if items is None else items * self._accumulation

    def train_on(self, batch: tuple[Any, Any], *, is_boundary: bool) -> torch.Tensor:
        trainer = self._trainer
        inputs, items = batch
        trainer.accelerator.gradient_state._set_sync_gradients(is_boundary)
        with self._synchronising(is_boundary):
            loss: torch.Tensor = trainer.training_step(trainer.model_wrapped, inputs, items)
        if is_boundary:
            if trainer.args.max_grad_norm > 0:
                _clip(trainer)
            trainer.optimizer.step()
            trainer.model_wrapped.zero_grad()
        return loss

    def _synchronising(self, is_boundary: bool) -> AbstractContextManager[Any]:
        """As the Trainer's own loop does: DeepSpeed decides for itself when gradients are reduced."""
        if is_boundary or self._grip.spec.uses_deepspeed or divides_gradients(self._grip.spec):
            return nullcontext()
        held_back: AbstractContextManager[Any] = self._trainer.accelerator.no_sync(self._trainer.model_wrapped)
        return held_back
