"""Taking hold of the Trainer of transformers, and of what is built on it."""

from __future__ import annotations

import copy
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ladder.events.protocol import CandidateSpec, CheckpointEvent
from ladder.trial.measuring import measure_all
from ladder.trial.model import set_checkpointing
from ladder.trial.reporter import now
from ladder.trial.script.evaluation import evaluate
from ladder.trial.script.hold import (
    Grip,
    NotTakenHoldOfError,
    model_facts,
    wrap,
)
from ladder.trial.script.real_steps import RealSteps
from ladder.trial.script.samples import Samples, shape_of
from ladder.workload.script import ScriptFacts

# What a trial must not do: it would write into the user's folders, tell the user's trackers, or train otherwise than
# is measured.
_CONTAINED: dict[str, Any] = {
    "report_to": "none",
    "push_to_hub": False,
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
}
# Other ways to train than the answer's.
_OTHER_WAYS: dict[str, Any] = {"auto_find_batch_size": False, "fsdp": None, "fsdp_config": None}

# Of a look: the model stays on the host, as nothing is trained.
_LOOKING: dict[str, Any] = {"deepspeed": None, "use_cpu": True, "bf16": False, "fp16": False, "tf32": None}


_MANY = 1 << 20
"""Optimizer steps. Chosen: more than any proof."""


def hold_trainer(grip: Grip) -> None:
    """From now on every Trainer of this process is looked at, or trained as the trial says, once it begins to."""

    def replaced(own: Any, arguments: Any) -> None:
        grip.holders.add("trainer")
        said = {name: copy.copy(getattr(arguments, name, None)) for name in _OWN}
        changes = {**_OTHER_WAYS}
        if not grip.is_run:
            changes |= {"output_dir": grip.script.scratch, **_CONTAINED}
        changes |= _LOOKING if grip.is_look else grip.script.arguments
        if grip.script.mode == "trial":
            changes["max_steps"] = _MANY  # a proof ends when its steps are timed, however few the script would make
        for name, value in changes.items():
            if hasattr(arguments, name):
                setattr(arguments, name, copy.deepcopy(value))
        own(arguments)
        arguments._ladder_own = said

    def held(own: Any, trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        if grip.is_look:
            grip.looked(lambda: _facts(trainer))
        trainer.add_callback(_Checkpointing(trainer, grip))
        if grip.is_run:
            more = {"resume_from_checkpoint": grip.script.resume} if grip.script.resume else {}
            return own(trainer, *(() if more else arguments), **options | more)
        trainer.add_callback(_Held(trainer, grip))
        return own(trainer)  # without a checkpoint to go on from

    def prepared(own: Any, *arguments: Any, **options: Any) -> Any:
        return grip.engine(lambda: own(*arguments, **options))

    def saved(own: Any, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        own(trainer, *arguments, **options)
        if not trainer.args.save_only_model:
            folder = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
            grip.reporter.send(CheckpointEvent(t=now(), folder=str(folder.absolute())))

    wrap(TrainingArguments, "__post_init__", replaced)
    wrap(Trainer, "train", held)
    if grip.is_run:
        wrap(Trainer, "_save_checkpoint", saved)
    wrap(Trainer, "_prepare_for_training", prepared)


_OWN = (
    "deepspeed",
    "fsdp",
    "bf16",
    "fp16",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "activation_checkpointing",
    "eval_strategy",
    "do_eval",
    "save_strategy",
    "optim",
    "max_grad_norm",
    "auto_find_batch_size",
    "use_liger_kernel",
)


def _facts(trainer: Trainer) -> ScriptFacts:
    args: Any = trainer.args
    own = args._ladder_own
    _require_training(trainer)
    samples = Samples(trainer.get_train_dataloader())
    rows, longest = shape_of(samples.longest(1))
    return ScriptFacts(
        kind="trainer",
        path="",
        digest="",
        **model_facts(trainer.model),
        micro_batch=own["per_device_train_batch_size"],
        accumulation=own["gradient_accumulation_steps"],
        dtype="bf16" if own["bf16"] else "fp16" if own["fp16"] else "fp32",
        optimizer=str(getattr(own["optim"], "value", own["optim"])),
        gradient_clipping=float(own["max_grad_norm"]),
        longest=longest,
        rows=rows,
        mean_tokens=samples.mean_tokens(),
        num_samples=samples.total,
        num_looked_at=len(samples.sizes),
        evaluates=trainer.eval_dataset is not None and (own["do_eval"] or str(own["eval_strategy"]) != "no"),
        checkpoints=str(getattr(own["save_strategy"], "value", own["save_strategy"])) != "no",
        overrides=tuple(_overrides(own)),
    )


def _require_training(trainer: Trainer) -> None:
    args: Any = trainer.args
    if hasattr(args, "generation_batch_size"):  # TRL's GRPO and its like
        raise NotTakenHoldOfError(
            f"its {type(trainer).__name__} generates what it trains on while it trains, which trials cannot do yet; "
            "tune an SFT of the same model and lengths in its place"
        )
    if args.max_steps <= 0 and args.num_train_epochs == 0:
        raise NotTakenHoldOfError("it is told to train no step: num_train_epochs is 0")
    if isinstance(trainer.train_dataset, Sized) and len(trainer.train_dataset) == 0:
        raise NotTakenHoldOfError("its training data set is empty")


def _overrides(own: dict[str, Any]) -> list[str]:
    said = []
    if own["deepspeed"]:
        name = own["deepspeed"] if isinstance(own["deepspeed"], str) else "its own"
        said.append(f"its DeepSpeed configuration ({name})")
    if own["fsdp"]:
        said.append("FSDP")
    if own["gradient_checkpointing"] or own["activation_checkpointing"]:
        said.append("its gradient checkpointing")
    if own["auto_find_batch_size"]:
        said.append("auto_find_batch_size")
    if own["use_liger_kernel"]:
        said.append("use_liger_kernel")
    return said


class _Checkpointing(TrainerCallback):  # type: ignore[misc]
    """Undoes what a script switched on by itself, as `peft.prepare_model_for_kbit_training` does; the Trainer only
    switches on."""

    def __init__(self, trainer: Trainer, grip: Grip) -> None:
        self._trainer, self._candidate = trainer, grip.spec.candidates[0]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if not self._candidate.checkpoint_every:
            set_checkpointing(self._trainer.model, self._candidate)


class _Held(TrainerCallback):  # type: ignore[misc]
    """Takes the training over once its engine stands."""

    def __init__(self, trainer: Trainer, grip: Grip) -> None:
        self._trainer, self._grip = trainer, grip

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._grip.spec.proof:
            self._trainer.add_callback(RealStepsOfTrainer(self._trainer, self._grip))
            return
        subject = TrainerSubject(self._trainer, self._grip)
        grip = self._grip
        grip.held("trainer", lambda: measure_all(grip.spec, subject, grip.reporter, grip.gauge))


class TrainerSubject:
    """Micro-steps through the `training_step` of the script's own Trainer, on batches of its own samples."""

    is_even = False

    def __init__(self, trainer: Trainer, grip: Grip) -> None:
        self._trainer, self._grip = trainer, grip
        self._loader = trainer.callback_handler.train_dataloader
        self._samples = Samples(self._loader)
        self._batches: dict[tuple[int, bool], Any] = {}
        accumulation = grip.spec.deepspeed["gradient_accumulation_steps"]
        trainer.current_gradient_accumulation_steps = accumulation
        self._accumulation = accumulation

    @property
    def skipped_steps(self) -> int:
        return int(getattr(self._trainer.model_wrapped, "skipped_steps", 0))

    def use(self, candidate: CandidateSpec) -> None:
        self._batches.clear()
        if not self._grip.script.arguments.get("activation_checkpointing") or len(self._grip.spec.candidates) > 1:
            set_checkpointing(self._trainer.model, candidate)

    def begin_step(self) -> None:
        """The Trainer's own steps begin with nothing."""

    def draw(self, candidate: CandidateSpec, *, longest: bool) -> tuple[Any, Any]:
        key = (candidate.micro_batch, longest)
        if key not in self._batches:
            make = self._samples.longest if longest else self._samples.usual
            self._batches[key] = make(candidate.micro_batch)
        batch = copy.copy(self._batches[key])  # a script may take things out of it
        trainer = self._trainer
        (batch,), items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        return batch, None if items is None else items * self._accumulation

    def train_on(self, batch: tuple[Any, Any], *, is_boundary: bool) -> torch.Tensor:
        trainer = self._trainer
        inputs, items = batch
        trainer.accelerator.gradient_state._set_sync_gradients(is_boundary)
        loss: torch.Tensor = trainer.training_step(trainer.model_wrapped, inputs, items)
        if is_boundary:
            if trainer.args.max_grad_norm > 0:
                trainer._get_grad_norm(trainer.model_wrapped, grad_norm=trainer._clip_grad_norm(trainer.model_wrapped))
            trainer.optimizer.step()
            trainer.model_wrapped.zero_grad()
        return loss

    def evaluate(self, candidate: CandidateSpec) -> None:
        """A proof trains through the Trainer's own loop (`RealStepsOfTrainer`)."""

    def gather(self, save_folder: str | None) -> None:
        """As `evaluate`."""


class RealStepsOfTrainer(TrainerCallback):  # type: ignore[misc]
    """The proof: the Trainer's own loop on the script's own data; then its evaluation, a save, and a resume."""

    def __init__(self, trainer: Trainer, grip: Grip) -> None:
        self._trainer, self._grip = trainer, grip
        self._steps = RealSteps(grip, Samples(trainer.callback_handler.train_dataloader))
        self._get_batches = trainer.get_batch_samples
        trainer.get_batch_samples = self._timed
        step = trainer.training_step

        def noted(*arguments: Any, **options: Any) -> Any:
            try:
                loss = step(*arguments, **options)
            except BaseException as error:
                grip.leave(error)
            self._steps.note_loss(loss)
            return loss

        trainer.training_step = noted

    def _timed(self, *arguments: Any, **options: Any) -> Any:
        with self._steps.loading():
            batches, items = self._get_batches(*arguments, **options)
        for batch in batches:
            self._steps.note_batch(batch)
        return batches, items

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._steps.end_step():
            self._grip.held("trainer", self._finish)

    def _finish(self) -> None:
        trainer, grip = self._trainer, self._grip
        facts = grip.script.facts
        if facts is not None and facts.evaluates:
            grip.reporter.phase("evaluation")
            with grip.reporter.during("evaluation"):
                evaluate(trainer)
        grip.reporter.phase("gather")
        with grip.reporter.during("gather"):
            if facts is not None and facts.checkpoints:
                trainer._save_checkpoint(trainer.model_wrapped, trial=None)
                self._resume()
            else:
                trainer.save_model(str(Path(grip.script.scratch) / "saved"))
        self._steps.report(trainer.model)

    def _resume(self) -> None:
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        trainer = self._trainer
        torch.distributed.barrier()
        folder = get_last_checkpoint(trainer.args.output_dir)
        if folder is not None and not trainer.args.save_only_model:
            strict = not hasattr(trainer.model, "peft_config")  # an adapter's checkpoint has the adapter alone
            deepspeed_load_checkpoint(trainer.model_wrapped, folder, load_module_strict=strict)
