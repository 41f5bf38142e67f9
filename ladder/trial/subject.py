"""What a trial trains, one micro-step at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.trial.backends import Training
from ladder.trial.model import make_batch, set_checkpointing
from ladder.trial.reporter import Reporter
from ladder.trial.techniques import begin_candidate, techniques_of

Kind = Literal["longest", "usual", "new"]
"""Of a batch: the longest that the data have, a usual one, or a usual one of a length that no batch had before."""


class Subject(ABC):
    """A model with random weights on random tokens, or a user's own script."""

    is_even = True
    """All batches of one size take the same time."""
    shared_seconds = 0.0
    """What a micro-step takes beside `train_on`: its share of work that is done once for several."""

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """Optimizer steps that were left out because gradients overflowed."""

    @abstractmethod
    def use(self, candidate: CandidateSpec) -> None:
        """Get ready for the micro-steps of `candidate`."""

    def begin_step(self) -> None:  # noqa: B027 - a script's own steps begin with nothing
        """The next micro-step is the first of an optimizer step."""

    def share_of_new_lengths(self, candidate: CandidateSpec) -> float:
        """Of a training's micro-steps: those whose batches are of a length that no batch had before, 0 to 1."""
        return 0.0

    @abstractmethod
    def draw(self, candidate: CandidateSpec, kind: Kind) -> Any:
        """A batch of that kind for `train_on`."""

    @abstractmethod
    def train_on(self, batch: Any, *, is_boundary: bool) -> torch.Tensor | float:
        """Forward, backward and, where `is_boundary`, the optimizer's step; returns the loss."""

    def evaluate(self, candidate: CandidateSpec) -> None:  # noqa: B027 - a script's proof is its own loop
        """One evaluation pass at the candidate's micro-batch."""

    def gather(self, save_folder: str | None) -> None:  # noqa: B027 - as `evaluate`
        """Gather the full 16-bit weights on rank 0's host as a save does; written to disk only under `save_folder`."""


def synchronize(device: str) -> None:
    """Wait until `device` has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def most_of_ranks(values: Sequence[float], device: str) -> list[float]:
    """Of each of `values` the largest that any rank has."""
    largest = torch.tensor(values, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [float(each) for each in largest]


class RandomModel(Subject):
    """A model with random weights, trained on random tokens of full length."""

    def __init__(self, model: PreTrainedModel, training: Training, spec: TrialSpec, reporter: Reporter) -> None:
        self._model, self._training = model, training
        self._spec, self._reporter = spec, reporter
        self._vocab_size: int = model.config.get_text_config().vocab_size
        # Seeded by rank and not by candidate: every candidate of every engine sees the same tokens.
        same_data = spec.shares_sequences or spec.same_data
        self._seed = spec.seed * 1000 + (0 if same_data else dist.get_rank())
        self._techniques = techniques_of(spec)
        self._generator = torch.Generator().manual_seed(self._seed)

    @property
    def skipped_steps(self) -> int:
        return self._training.skipped_steps

    def use(self, candidate: CandidateSpec) -> None:
        begin_candidate(self._techniques)
        set_checkpointing(self._model, candidate)

    def begin_step(self) -> None:
        if self._spec.parity:
            self._generator.manual_seed(self._seed)

    def draw(self, candidate: CandidateSpec, kind: Kind) -> dict[str, torch.Tensor]:
        batch = make_batch(self._spec, self._vocab_size, candidate.micro_batch, self._generator)
        for technique in self._techniques:
            batch = technique.own_batch(batch)
        return batch

    def train_on(self, batch: dict[str, torch.Tensor], *, is_boundary: bool) -> torch.Tensor:
        self._training.begin(is_boundary=is_boundary)
        with self._reporter.during("forward"):
            loss: torch.Tensor = self._training(**batch).loss
            for technique in self._techniques:
                loss = technique.whole_loss(loss, batch)
        with self._reporter.during("backward"):
            self._training.backward(loss)
        with self._reporter.during("step"):
            self._training.step()
            synchronize(self._spec.device)
        return loss.detach()

    def evaluate(self, candidate: CandidateSpec) -> None:
        self._training.eval()
        with torch.no_grad(), self._reporter.during("evaluation"):
            batch = make_batch(self._spec, self._vocab_size, candidate.micro_batch, self._generator)
            arguments: dict[str, Any] = {}
            for technique in self._techniques:
                batch = technique.evaluation_batch(batch, self._spec)
                arguments |= technique.evaluation_arguments
            self._training(**batch, **arguments)
        self._training.train()
        synchronize(self._spec.device)

    def gather(self, save_folder: str | None) -> None:
        with self._reporter.during("gather"):
            self._training.gather(save_folder)
            synchronize(self._spec.device)
