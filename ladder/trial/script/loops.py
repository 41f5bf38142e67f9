"""Taking hold of a training loop of the script's own, with accelerate or with DeepSpeed alone: through its data loader.

The loop asks the loader for a batch when it has trained on the one before. So whoever gives the batches also knows when
a micro-step begins and ends, and can give any batch.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import accelerate
import deepspeed
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ladder.events.protocol import CandidateSpec
from ladder.trial.measuring import measure_all
from ladder.trial.model import set_checkpointing
from ladder.trial.script.hold import (
    Grip,
    NotTakenHoldOfError,
    class_in_words,
    config_of,
    count_parameters,
    wrap,
)
from ladder.trial.script.real_steps import RealSteps
from ladder.trial.script.samples import Samples, count_tokens, rebatched, shape_of
from ladder.workload.script import ScriptFacts, ScriptKind

Move = Callable[[Any], Any]
"""Puts a batch where the script's own loader would have put it."""


class Loop:
    """The loop's training as its hooks see it: its engine, whether an optimizer step ends, and the last loss."""

    def __init__(self, grip: Grip, kind: ScriptKind) -> None:
        self.grip, self.kind = grip, kind
        self.engine: Any = None
        self.is_boundary = True
        self.is_finishing = False
        self.loss: torch.Tensor | float = 0.0
        _note_losses(self)

    def hold(self, loader: Any, move: Move) -> None:
        """Let `loader` give the trial's batches to the loop that iterates over it."""

        def iterated(own: Any, each: Any) -> Iterator[Any]:
            if each is not loader or not self.is_training():
                return cast("Iterator[Any]", own(each))
            if self.grip.is_run:
                return self._trained(own(loader))
            return self._real(loader, lambda: own(loader)) if self.grip.spec.proof else self._measured(loader, move)

        wrap(type(loader), "__iter__", iterated)  # of the class: Python looks for it nowhere else

    def is_training(self) -> bool:
        """Whether the loop that asks is the one that trains."""
        return bool(self.engine.module.training)

    def _trained(self, epoch: Iterator[Any]) -> Iterator[Any]:
        """The user's own training: every batch, with an optimizer step after as many as the answer accumulates."""
        accumulation = self.grip.spec.candidates[0].accumulation
        for number, batch in enumerate(epoch, start=1):
            self.is_boundary = number % accumulation == 0
            yield batch

    def _measured(self, loader: Any, move: Move) -> Iterator[Any]:
        """Batches as the measuring asks for them, in a thread of its own: the loop keeps the main one."""
        subject, grip = LoopSubject(self, Samples(loader), move), self.grip

        def measure() -> None:
            if grip.spec.device == "cuda":
                torch.cuda.set_device(0)
            grip.held(self.kind, lambda: measure_all(grip.spec, subject, grip.reporter, grip.gauge))

        threading.Thread(target=measure, name="measuring", daemon=True).start()
        return subject.batches()

    def _real(self, loader: Any, epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The proof: the script's own batches, epoch after epoch, until enough optimizer steps were timed."""
        (candidate,) = self.grip.spec.candidates
        steps = RealSteps(self.grip, Samples(loader))
        try:
            while True:
                own = epoch()
                while True:
                    for micro_step in range(1, candidate.accumulation + 1):
                        with steps.loading():
                            batch = next(own, None)
                        if batch is None:
                            break
                        self.is_boundary = micro_step == candidate.accumulation
                        steps.note_tokens(*count_tokens(batch))
                        yield batch
                        steps.note_loss(torch.as_tensor(self.loss))
                    if batch is None:
                        break
                    if steps.end_step():
                        self.grip.held(self.kind, lambda: self._finish(steps))
        except GeneratorExit:
            self.grip.leave(_left_early())

    def _finish(self, steps: RealSteps) -> None:
        """A checkpoint of DeepSpeed's, and a resume from it."""
        self.is_finishing = True
        reporter, folder = self.grip.reporter, str(Path(self.grip.script.scratch) / "checkpoint")
        reporter.phase("gather")
        with reporter.during("gather"):
            self.engine.save_checkpoint(folder)
            self.engine.load_checkpoint(folder)
        steps.report()


class LoopSubject:
    """Micro-steps of the script's own loop, on batches of its own samples."""

    is_even = False

    def __init__(self, loop: Loop, samples: Samples, move: Move) -> None:
        self._loop, self._samples, self._move = loop, samples, move
        self._to_loop: SimpleQueue[Any] = SimpleQueue()
        self._from_loop: SimpleQueue[None] = SimpleQueue()
        self._num_begun = 0

    def batches(self) -> Iterator[Any]:
        """For the loop: it trains on each before it asks for the next."""
        try:
            while True:
                yield self._to_loop.get()
                self._from_loop.put(None)
        except GeneratorExit:  # what was measured by then stands
            self._loop.grip.leave(None if self._num_begun > 1 else _left_early())

    @property
    def skipped_steps(self) -> int:
        return int(self._loop.engine.skipped_steps)

    def use(self, candidate: CandidateSpec) -> None:
        self._num_begun += 1
        set_checkpointing(self._loop.engine.module, candidate)

    def begin_step(self) -> None:
        """The loop's own steps begin with nothing."""

    def draw(self, candidate: CandidateSpec, *, longest: bool) -> Any:
        make = self._samples.longest if longest else self._samples.usual
        return self._move(make(candidate.micro_batch))

    def train_on(self, batch: Any, *, is_boundary: bool) -> torch.Tensor | float:
        self._loop.is_boundary = is_boundary
        self._to_loop.put(batch)
        self._from_loop.get()
        return self._loop.loss

    def evaluate(self, candidate: CandidateSpec) -> None:
        """A proof trains on the loop's own batches."""

    def gather(self, save_folder: str | None) -> None:
        """As `evaluate`."""


def _left_early() -> NotTakenHoldOfError:
    return NotTakenHoldOfError("the script's loop ended before its steps were measured; let it train for longer")


def _note_losses(loop: Loop) -> None:
    def noted(own: Any, engine: Any, loss: Any, *arguments: Any, **options: Any) -> Any:
        loop.loss = loss.detach()
        return own(engine, loss, *arguments, **options)

    wrap(deepspeed.DeepSpeedEngine, "backward", noted)


def _write_nothing(owner: Any, names: tuple[str, ...], loop: Loop) -> None:
    """A loop that saves as it goes saves nothing in a trial."""

    def written(own: Any, *given: Any, **options: Any) -> Any:
        return own(*given, **options) if loop.engine is None or loop.is_finishing else None

    for name in names:
        wrap(owner, name, written)


_WRITERS = ("save_state", "save_model", "init_trackers", "log", "end_training")


def hold_accelerate(grip: Grip) -> None:
    """From now on every Accelerator of this process prepares what the trial says."""
    loop = Loop(grip, "accelerate")

    def made(own: Any, accelerator: Any, *arguments: Any, **options: Any) -> None:
        if "trainer" not in grip.holders:  # which makes its own, as its arguments say
            grip.holders.add("accelerate")
            accelerator._ladder_own = dict(options)
            options |= _options_of_accelerate(grip)
        own(accelerator, *arguments, **options)

    def prepared(own: Any, accelerator: Any, *things: Any, **options: Any) -> Any:
        loaders = [each for each in things if isinstance(each, DataLoader)]
        models = [each for each in things if isinstance(each, torch.nn.Module)]
        if not (loaders and models and hasattr(accelerator, "_ladder_own")):
            return own(accelerator, *things, **options)
        if grip.is_look:
            grip.looked(lambda: _facts_of_accelerate(accelerator, models[0], loaders[0], things))
        micro_batch = grip.spec.candidates[0].micro_batch
        changed = [rebatched(each, micro_batch) if each is loaders[0] else each for each in things]
        ready = grip.engine(lambda: own(accelerator, *changed, **options))
        loop.engine = ready[_place(models[0], things)]
        set_checkpointing(loop.engine.module, grip.spec.candidates[0])
        loop.hold(ready[_place(loaders[0], things)], lambda batch: send_to_device(batch, accelerator.device))
        return ready

    def stepped(own: Any, accelerator: Any, *arguments: Any, **options: Any) -> Any:
        if loop.engine is not None:  # whether or not the loop asks accelerate when to step
            ends = loop.is_boundary or accelerator.gradient_state.end_of_dataloader
            accelerator.gradient_state._set_sync_gradients(ends)
        return own(accelerator, *arguments, **options)

    def clipped(own: Any, accelerator: Any, parameters: Any, max_norm: float, *given: Any, **options: Any) -> Any:
        if loop.engine is not None:  # accelerate leaves it to DeepSpeed's configuration, which the script has not
            loop.engine.optimizer.clip_grad = float(max_norm)
        return own(accelerator, parameters, max_norm, *given, **options)

    wrap(accelerate.Accelerator, "clip_grad_norm_", clipped)
    wrap(accelerate.Accelerator, "__init__", made)
    wrap(accelerate.Accelerator, "prepare", prepared)
    wrap(accelerate.Accelerator, "backward", stepped)
    if not grip.is_run:
        _write_nothing(accelerate.Accelerator, _WRITERS, loop)
        _write_nothing(PreTrainedModel, ("save_pretrained", "push_to_hub"), loop)
        _write_nothing(torch, ("save",), loop)


def _place(thing: Any, things: tuple[Any, ...]) -> int:
    return next(place for place, each in enumerate(things) if each is thing)


def _options_of_accelerate(grip: Grip) -> dict[str, Any]:
    changes: dict[str, Any] = {"fsdp_plugin": None}
    if not grip.is_run:
        changes |= {"log_with": None, "project_dir": grip.script.scratch}
    if grip.is_look:
        return changes | {"cpu": True, "mixed_precision": "no", "deepspeed_plugin": None}
    # `cpu=True` would leave DeepSpeed out; asked for beforehand, it says how ranks find each other, no more.
    accelerate.PartialState(cpu=grip.spec.device == "cpu")
    return changes | {
        "cpu": False,
        "mixed_precision": grip.spec.dtype,
        "deepspeed_plugin": accelerate.DeepSpeedPlugin(hf_ds_config=copy.deepcopy(grip.spec.deepspeed)),
        "gradient_accumulation_steps": grip.spec.deepspeed["gradient_accumulation_steps"],
        "gradient_accumulation_plugin": None,
    }


def _facts_of_accelerate(accelerator: Any, model: Any, loader: DataLoader[Any], things: Any) -> ScriptFacts:
    own = accelerator._ladder_own
    optimizer = next((each for each in things if isinstance(each, torch.optim.Optimizer)), None)
    precision = str(own.get("mixed_precision") or "no")
    return _facts(
        "accelerate",
        model,
        loader,
        accumulation=accelerator.gradient_accumulation_steps,
        dtype=precision if precision in ("bf16", "fp16") else "fp32",
        optimizer=type(optimizer).__name__ if optimizer is not None else "",
        overrides=("its DeepSpeed plugin",) if own.get("deepspeed_plugin") else (),
    )


def _facts(kind: ScriptKind, model: Any, loader: DataLoader[Any], **known: Any) -> ScriptFacts:
    samples = Samples(loader)
    rows, longest = shape_of(samples.longest(1))
    total, trainable = count_parameters(model)
    return ScriptFacts(
        kind=kind,
        path="",
        digest="",
        model_config_json=config_of(model),
        model_class=class_in_words(model),
        num_parameters=total,
        num_trainable=trainable,
        micro_batch=loader.batch_size or 1,
        longest=longest,
        rows=rows,
        mean_tokens=samples.mean_tokens(),
        num_samples=samples.total,
        num_looked_at=len(samples.sizes),
        **{"gradient_clipping": 0.0, **known},
    )


def hold_deepspeed(grip: Grip) -> None:
    """From now on `deepspeed.initialize` makes the trial's engine, and the script's loader gives its batches."""
    loop = Loop(grip, "deepspeed")
    loaders: list[Any] = []

    def noted(own: Any, loader: Any, *arguments: Any, **options: Any) -> None:
        own(loader, *arguments, **options)
        loaders.append(loader)

    def initialized(own: Any, *arguments: Any, **options: Any) -> Any:
        if grip.holders:  # they make their engines themselves, of a second model too
            return own(*arguments, **options)
        names = ("args", "model", "optimizer", "model_parameters", "training_data")
        given = dict[str, Any](zip(names, arguments, strict=False)) | options
        said = _own_config(given)
        loader = _training_loader(loaders)
        if grip.is_look:
            grip.looked(lambda: _facts_of_deepspeed(given, said, loader))
        config = copy.deepcopy(grip.spec.deepspeed)
        config |= {name: said[name] for name in ("optimizer", "scheduler") if name in said}
        given |= {"config": config, "config_params": None}
        if getattr(given.get("args"), "deepspeed_config", None):
            given["args"].deepspeed_config = None
        ready = grip.engine(lambda: own(**_with_cpu_adam(given)))
        loop.engine = ready[0]
        set_checkpointing(loop.engine.module, grip.spec.candidates[0])
        _rebatch(loader, grip.spec.candidates[0].micro_batch)
        loop.hold(loader, lambda batch: batch)
        return ready

    wrap(DataLoader, "__init__", noted)
    wrap(deepspeed, "initialize", initialized)
    if not grip.is_run:
        _write_nothing(deepspeed.DeepSpeedEngine, ("save_16bit_model", "save_checkpoint"), loop)
        _write_nothing(PreTrainedModel, ("save_pretrained", "push_to_hub"), loop)
        _write_nothing(torch, ("save",), loop)


def _training_loader(made: list[Any]) -> Any:
    """The first that was made with a data set in random order, else the first."""
    if not made:
        raise NotTakenHoldOfError(
            "no torch DataLoader was made before deepspeed.initialize() was called, so its data cannot be looked at"
        )
    shuffled = [each for each in made if not isinstance(each.sampler, torch.utils.data.SequentialSampler)]
    return (shuffled or made)[0]


def _rebatch(loader: DataLoader[Any], micro_batch: int) -> None:
    """Change the micro-batch of a loader that the script has already."""
    vars(loader).update(vars(rebatched(loader, micro_batch)))


def _own_config(given: dict[str, Any]) -> dict[str, Any]:
    args = given.get("args")
    own = given.get("config") or given.get("config_params") or getattr(args, "deepspeed_config", None) or {}
    if isinstance(own, str | Path):
        own = json.loads(Path(own).read_text(encoding="utf-8"))
    return dict(own)


def _with_cpu_adam(given: dict[str, Any]) -> dict[str, Any]:
    """With the optimizer's states on the host DeepSpeed takes its own Adam only: that of the script is mapped to it."""
    from accelerate.utils import map_pytorch_optim_to_deepspeed

    offloads = "offload_optimizer" in given["config"]["zero_optimization"]
    if offloads and isinstance(given.get("optimizer"), torch.optim.Optimizer):
        given = {**given, "optimizer": map_pytorch_optim_to_deepspeed(given["optimizer"])}
    return given


def _facts_of_deepspeed(given: dict[str, Any], own: dict[str, Any], loader: DataLoader[Any]) -> ScriptFacts:
    def enabled(name: str) -> bool:
        return bool(own.get(name, {}).get("enabled"))

    optimizer = given.get("optimizer")
    named = own.get("optimizer", {}).get("type", "")
    facts = _facts(
        "deepspeed",
        given["model"],
        loader,
        accumulation=int(own.get("gradient_accumulation_steps") or 1),
        dtype="bf16" if enabled("bf16") else "fp16" if enabled("fp16") else "fp32",
        optimizer=type(optimizer).__name__ if optimizer is not None else named,
        gradient_clipping=float(own.get("gradient_clipping") or 0.0),
        overrides=("its DeepSpeed configuration",),
    )
    return facts
