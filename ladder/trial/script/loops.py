"""Taking hold of a training loop of the script's own, with accelerate or with DeepSpeed alone: through its data loader.

The loop asks the loader for a batch when it has trained on the one before. So whoever gives the batches also knows when
a micro-step begins and ends, and can give any batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import deepspeed
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ladder.events.step_policy import CandidateSpec
from ladder.trial.measuring import measure_all
from ladder.trial.model import set_checkpointing
from ladder.trial.script.hold import Grip, NotTakenHoldOfError, model_facts
from ladder.trial.script.real_steps import RealSteps
from ladder.trial.script.samples import Samples, shape_of
from ladder.trial.script.seen import TrainsOtherwiseError
from ladder.trial.subject import Kind
from ladder.trial.wrapping import wrap
from ladder.workload.script import ScriptFacts, ScriptKind

Move = Callable[[Any], Any]
"""Puts a batch where the script's own loader would have put it."""


class Loop:
    """The loop's training as its hooks see it: its engine, whether an optimizer step ends, and the last loss."""

    def __init__(self, grip: Grip, kind: ScriptKind) -> None:
        self.grip, self.kind = grip, kind
        self.engine: Any = None
        self.accelerator: Any = None
        """Of a loop with accelerate."""
        self.is_boundary = True
        self.is_finishing = False
        self.loss: torch.Tensor | float = 0.0
        self.has_begun = False
        """It was given a batch."""
        self.has_trained = False
        """It has made a backward pass since it was given a batch."""
        self.clipping: float | None = None
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

    def note_loss(self, loss: torch.Tensor) -> None:
        """Of a backward pass that begins."""
        self.loss, self.has_trained = loss.detach(), True

    def require_first(self) -> None:
        """End a trial whose script begins to train anew: it has caught what ended its first loop."""
        if self.has_begun:
            self.grip.leave(_left_early())

    @property
    def model(self) -> Any:
        """The script's own; without DeepSpeed and other ranks nothing wraps it."""
        return getattr(self.engine, "module", self.engine)

    def is_training(self) -> bool:
        """Whether the loop that asks is the one that trains."""
        return bool(self.model.training)

    def _trained(self, epoch: Iterator[Any]) -> Iterator[Any]:
        """The user's own training: every batch, with an optimizer step after as many as the answer accumulates."""
        accumulation = self.grip.spec.candidates[0].accumulation
        for number, batch in enumerate(epoch, start=1):
            self.is_boundary = number % accumulation == 0
            yield batch

    def _measured(self, loader: Any, move: Move) -> Iterator[Any]:
        """Batches as the measuring asks for them, in a thread of its own: the loop keeps the main one."""
        subject, grip = LoopSubject(self, self._samples(loader), move), self.grip

        def measure() -> None:
            if grip.spec.device == "cuda":
                torch.cuda.set_device(0)
            grip.held(self.kind, lambda: measure_all(grip.spec, subject, grip.reporter, grip.gauge))

        threading.Thread(target=measure, name="measuring", daemon=True).start()
        return subject.batches()

    def _samples(self, loader: Any) -> Samples:
        return Samples(loader, known=self.grip.known_sizes)

    def _real(self, loader: Any, epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The proof: the script's own batches, epoch after epoch, until enough optimizer steps were timed."""
        (candidate,) = self.grip.spec.candidates
        steps = RealSteps(self.grip, self._samples(loader))
        made = _StepsMade(self.engine)
        try:
            while True:
                own = epoch()
                made.num_epochs += 1
                while True:
                    for micro_step in range(1, candidate.accumulation + 1):
                        with steps.loading():
                            batch = next(own, None)
                        if batch is None:
                            break
                        self.is_boundary = micro_step == candidate.accumulation
                        steps.note_batch(batch)
                        self.has_begun, self.has_trained = True, False
                        yield batch
                        if not self.has_trained:
                            self.grip.leave(_left_out())
                        steps.note_loss(torch.as_tensor(self.loss))
                    if batch is None:
                        steps.drop_step()
                        break
                    made.expected += 1
                    if steps.end_step():
                        self.grip.held(self.kind, lambda: self._finish(steps, made))
        except GeneratorExit:  # the loop has ended
            if steps.are_measured:
                self.grip.held(self.kind, lambda: self._finish(steps, made))
            self.grip.leave(_left_early())

    def _finish(self, steps: RealSteps, made: _StepsMade) -> None:
        """A checkpoint, and a resume from it."""
        made.require()
        self.is_finishing = True
        reporter, folder = self.grip.reporter, str(Path(self.grip.script.scratch) / "checkpoint")
        reporter.phase("gather")
        saves, loads = self._writers()
        with reporter.during("save"):
            saves(folder)
        with reporter.during("resume"):
            loads(folder)
        steps.report(self.model, self.clipping)

    def _writers(self) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
        """What saves a checkpoint in a folder, and what loads it."""
        if self.grip.spec.uses_deepspeed:
            return self.engine.save_checkpoint, self.engine.load_checkpoint

        def saved(folder: str) -> None:
            self.accelerator.save_state(folder)
            self.accelerator.wait_for_everyone()  # rank 0 alone writes

        return saved, self.accelerator.load_state


class _StepsMade:
    """The optimizer steps of a loop's own engine, beside those that it should have made."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._before = engine, self._count(engine)
        self.expected = self.num_epochs = 0

    @staticmethod
    def _count(engine: Any) -> int | None:
        """None without DeepSpeed."""
        found: int | None = getattr(engine, "global_steps", None)
        return found

    def require(self) -> None:
        """TrainsOtherwiseError if the loop does not let every micro-step count. What is left of an epoch may."""
        now = self._count(self._engine)
        if now is None or self._before is None:
            return
        made = now - self._before
        if not self.expected <= made <= self.expected + self.num_epochs:
            raise TrainsOtherwiseError(
                f"its optimizer made {made} steps where the candidate makes {self.expected}; call the engine's step() "
                "after every micro-step, and leave it to ladder to accumulate"
            )


class LoopSubject:
    """Micro-steps of the script's own loop, on batches of its own samples."""

    shared_seconds = 0.0

    def __init__(self, loop: Loop, samples: Samples, move: Move) -> None:
        self._loop, self._samples, self._move = loop, samples, move
        self.is_even = samples.are_alike
        self._to_loop: SimpleQueue[Any] = SimpleQueue()
        self._from_loop: SimpleQueue[None] = SimpleQueue()
        self._num_begun = 0

    def batches(self) -> Iterator[Any]:
        """For the loop: it trains on each before it asks for the next."""
        try:
            while True:
                batch = self._to_loop.get()
                self._loop.has_begun, self._loop.has_trained = True, False
                yield batch
                if not self._loop.has_trained:
                    self._loop.grip.leave(_left_out())
                self._from_loop.put(None)
        except GeneratorExit:  # what was measured by then stands
            self._loop.grip.leave(None if self._num_begun > 1 else _left_early())

    @property
    def skipped_steps(self) -> int:
        return int(getattr(self._loop.engine, "skipped_steps", 0))

    def use(self, candidate: CandidateSpec) -> None:
        self._num_begun += 1
        set_checkpointing(self._loop.model, candidate)

    def begin_step(self) -> None:
        """The loop's own steps begin with nothing."""

    def share_of_new_lengths(self, candidate: CandidateSpec) -> float:
        return self._samples.share_of_new_lengths(candidate.micro_batch)

    def draw(self, candidate: CandidateSpec, kind: Kind) -> Any:
        return self._move(self._samples.batch(candidate.micro_batch, kind))

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
    return NotTakenHoldOfError(
        "the script's loop ended before its steps were measured; let it train for longer, and let its errors end it"
    )


def _left_out() -> NotTakenHoldOfError:
    return NotTakenHoldOfError(
        "the script's loop trained nothing on a batch, as after an error that it caught; let it call the engine's or "
        "accelerator's backward() on every batch, and let its errors end it"
    )


def _note_losses(loop: Loop) -> None:
    def noted(own: Any, engine: Any, loss: Any, *arguments: Any, **options: Any) -> Any:
        loop.note_loss(loss)
        return own(engine, loss, *arguments, **options)

    wrap(deepspeed.DeepSpeedEngine, "backward", noted)


def hold_back_writing(loop: Loop) -> None:
    """Of what a loop may call to save its model."""
    write_nothing(PreTrainedModel, ("save_pretrained", "push_to_hub"), loop)
    write_nothing(torch, ("save",), loop)


def write_nothing(owner: Any, names: tuple[str, ...], loop: Loop) -> None:
    """A loop that saves as it goes saves nothing in a trial."""

    def written(own: Any, *given: Any, **options: Any) -> Any:
        return own(*given, **options) if loop.engine is None or loop.is_finishing else None

    for name in names:
        wrap(owner, name, written)


def facts_of_loop(kind: ScriptKind, model: Any, loader: DataLoader[Any], **known: Any) -> ScriptFacts:
    samples = Samples(loader)
    rows, longest = shape_of(samples.longest(1))
    return ScriptFacts(
        kind=kind,
        path="",
        digest="",
        **model_facts(model),
        micro_batch=loader.batch_size or 1,
        longest=longest,
        rows=rows,
        mean_tokens=samples.mean_tokens(),
        num_samples=samples.total,
        num_looked_at=len(samples.sizes),
        sizes=samples.read_singly,
        **{"gradient_clipping": 0.0, **known},
    )
