"""Taking hold of a training loop of the script's own, with accelerate or with DeepSpeed alone.

The loop is left alone until its first optimizer step is over: only a backward pass shows that it trains, and on which
loader. From then on that loader gives the trial's batches. The loop asks for one when it has trained on the one before,
so whoever gives them also knows when a micro-step begins and ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ladder.trial.measuring import measure_all
from ladder.trial.of_deepspeed import engine_methods
from ladder.trial.script.facts import model_facts, sample_facts
from ladder.trial.script.hold import Grip, NotTakenHoldOfError, too_few
from ladder.trial.script.loop_subject import LoopSubject, Move
from ladder.trial.script.options import guard_length, told_otherwise
from ladder.trial.script.real_steps import RealSteps
from ladder.trial.script.samples import Samples, rebatched
from ladder.trial.script.seen import TrainsOtherwiseError
from ladder.trial.wrapping import wrap
from ladder.workload.script import ScriptFacts, ScriptKind

_MOST_UNHELD = 8
"""Optimizer steps before a loop is held. Chosen: one is enough, or a few where a batch has several backward passes."""
_ELSEWHERE = (
    "it trains on other batches than those of the loader that was prepared with its model, or made before its engine; "
    "let it train on those"
)


class Loop:
    """The loop's training as its hooks see it: its engine, whether an optimizer step ends, and the last loss."""

    def __init__(self, grip: Grip, kind: ScriptKind) -> None:
        self.grip, self.kind = grip, kind
        self.engine: Any = None
        self.accelerator: Any = None
        """Of a loop with accelerate."""
        self.told_boundary: bool | None = None
        """Whether the micro-step ends an optimizer step, where a trial says so; else the accumulation does."""
        self.loss: Any = None
        self.clipping: float | None = None
        self.is_measured: Callable[[], bool] = lambda: False
        """Whether what was measured by now is enough."""
        self._is_held = False
        """Its loader gives the trial's batches."""
        self._accumulated = 0
        """Micro-steps since the last optimizer step."""
        self._own_micro_batch: int | None = None
        """Of its loader, as the script makes it."""
        self.asks_when_to_step = False
        """It leaves it to accelerate which micro-steps end an optimizer step."""
        self._is_step_due = False
        """It has to call its optimizer before the next micro-step."""
        _note_losses(self)

    @property
    def ends_step(self) -> bool:
        """Whether an optimizer step ends with the micro-step that is made now, or next."""
        if self.accelerator is not None and self.accelerator.gradient_state.end_of_dataloader:
            return True
        if self.told_boundary is not None:
            return self.told_boundary
        return self._accumulated + 1 >= self._accumulation

    @property
    def _accumulation(self) -> int:
        """In a trial, that of its configuration."""
        if self.grip.is_run:
            return self.grip.spec.candidates[0].accumulation
        return int(self.grip.spec.deepspeed["gradient_accumulation_steps"])

    @property
    def model(self) -> Any:
        """The script's own; without DeepSpeed and other ranks nothing wraps it."""
        return getattr(self.engine, "module", self.engine)

    def hold(self, loader: Any, move: Move) -> None:
        """The engine stands: let `loader` give the trial's batches to whoever trains on it."""
        made, end = self.grip.made, self.grip.loop_end
        made.before_backward.append(self._note_backward)
        if self._own_micro_batch != self.grip.spec.candidates[0].micro_batch:
            guard_length(loader, self.grip.leave)
        if self.grip.is_run:
            return
        end.ended = self.ended
        self.grip.saves.redirect()
        if self.grip.script.facts is not None:
            end.accumulation = self.grip.script.facts.accumulation
        self.grip.reporter.candidate = self.grip.spec.candidates[0].key
        self.grip.reporter.phase("warmup")

        def iterated(own: Any, each: Any) -> Any:
            # A part of it, as accelerate's skip_first_batches makes one, is another loader of the same data.
            is_ours = getattr(each, "dataset", None) is loader.dataset
            return self._given(own(each), lambda: own(loader), loader, move) if is_ours else own(each)

        wrap(type(loader), "__iter__", iterated)  # of the class: Python looks for it nowhere else

    def note_loss(self, loss: Any) -> None:
        """Of a backward pass that begins; that of an engine or accelerator comes before autograd's, which is scaled."""
        if self.loss is None:
            self.loss = loss.detach() if torch.is_tensor(loss) else 0.0

    def require_told(self, own_micro_batch: int | None) -> None:
        """End a training whose loader has not the micro-batch that its script was told by an option."""
        self._own_micro_batch, told = own_micro_batch, self.grip.spec.candidates[0].micro_batch
        if "micro_batch" in self.grip.script.told and own_micro_batch != told:
            self.grip.leave(told_otherwise(told, own_micro_batch))

    def note_step(self) -> None:
        """The script calls its optimizer."""
        self._is_step_due = False
        self.grip.loop_end.note_step()

    def require_first(self) -> None:
        """End a trial whose script begins to train anew: nothing has seen its first loop end."""
        if self.grip.made.micro_steps and not self.grip.is_run:
            self.ended()

    def ended(self, error: BaseException | None = None) -> None:
        """The script has left its loop, because of `error` if there is one: nothing that follows may run."""
        if error is not None and not isinstance(error, SystemExit):
            self.grip.leave(error)
        if self.is_measured():
            self.grip.held(self.kind, self.finish)
        self.grip.leave(too_few(self.grip))

    def finish(self) -> None:
        """What is left to do when enough is measured."""

    def _note_backward(self, tensors: Any) -> None:
        if self._is_step_due:
            self.grip.leave(TrainsOtherwiseError(_BY_HAND))
        self._is_step_due = self.kind == "accelerate" and not self.asks_when_to_step
        self._accumulated = 0 if self.ends_step else self._accumulated + 1
        self.note_loss(tensors)
        if not self.grip.is_run:
            self.grip.loop_end.note_backward()
            if not self._is_held and self.grip.made.micro_steps > _MOST_UNHELD * self._accumulation:
                self.grip.leave(NotTakenHoldOfError(_ELSEWHERE))

    def _given(self, own: Iterator[Any], begin: Callable[[], Any], loader: Any, move: Move) -> Iterator[Any]:
        """The script's `own` batches until an optimizer step is over on one of them; then the trial's.

        `begin` begins an epoch of `loader`.
        """
        made, end, epoch = self.grip.made, self.grip.loop_end, own
        while True:
            end.note_draw()
            with end.paused():
                batch = next(epoch, None)
            if batch is None:
                return
            trained, tried = made.micro_steps, made.forwards
            yield batch
            if trained < made.micro_steps:
                if self._accumulated == 0:
                    break
            elif tried < made.forwards:
                self.grip.leave(_left_out())
        self._is_held = True
        try:
            if self.grip.spec.proof:
                yield from self._real(loader, chain([epoch], iter(begin, None)))
            else:
                del own, epoch
                yield from self._measured(loader, move)
        except GeneratorExit:
            self.ended(end.error)

    def _measured(self, loader: Any, move: Move) -> Iterator[Any]:
        """Batches as the measuring asks for them, in a thread of its own: the loop keeps the main one."""
        if hasattr(loader, "end"):  # accelerate's: the epoch that was begun goes no further
            loader.end()
        subject, grip = LoopSubject(self, self._samples(loader), move), self.grip
        self.is_measured = lambda: subject.num_begun > 1  # what was measured by then stands

        def measure() -> None:
            if grip.spec.device == "cuda":
                torch.cuda.set_device(0)
            grip.held(self.kind, lambda: measure_all(grip.spec, subject, grip.reporter, grip.gauge))

        threading.Thread(target=measure, name="measuring", daemon=True).start()
        return subject.batches()

    def _samples(self, loader: Any) -> Samples:
        if not isinstance(loader, DataLoader):  # DeepSpeed's own, which makes one of torch's for each epoch
            each = {"batch_size": loader.batch_size, "sampler": loader.data_sampler, "collate_fn": loader.collate_fn}
            loader = DataLoader(loader.dataset, **each)
        return Samples(loader, known=self.grip.known_sizes)

    def _real(self, loader: Any, epochs: Iterator[Iterator[Any]]) -> Iterator[Any]:
        """The proof: the script's own batches, epoch after epoch, until enough optimizer steps were timed."""
        (candidate,) = self.grip.spec.candidates
        steps = RealSteps(self.grip, self._samples(loader))
        engine = _EngineSteps(self.engine)
        self.is_measured = lambda: steps.are_measured
        self.finish = lambda: self._finish(steps, engine)  # type: ignore[method-assign]
        for epoch in epochs:
            engine.num_epochs += 1
            while True:
                for _ in range(candidate.accumulation):
                    with steps.loading(), self.grip.loop_end.paused():
                        batch = next(epoch, None)
                    if batch is None:
                        break
                    steps.note_batch(batch)
                    yield from self.trained_on(batch)
                    steps.note_loss(torch.as_tensor(self.loss))
                if batch is None:
                    steps.drop_step()
                    break
                engine.expected += 1
                if steps.end_step():
                    self.grip.held(self.kind, self.finish)

    def trained_on(self, batch: Any) -> Iterator[Any]:
        """`batch`, on which the loop has to train before it asks for the next."""
        before, self.loss = self.grip.made.micro_steps, None
        yield batch
        if self.grip.made.micro_steps == before:
            self.grip.leave(_left_out())

    def _finish(self, steps: RealSteps, engine: _EngineSteps) -> None:
        """A checkpoint, and a resume from it."""
        engine.require()
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


class _EngineSteps:
    """The optimizer steps of a loop's own engine, beside those that it should have made."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._before = engine, getattr(engine, "global_steps", None)
        self.expected = self.num_epochs = 0

    def require(self) -> None:
        """TrainsOtherwiseError if the loop does not let every micro-step count. What is left of an epoch may."""
        if self._before is None:  # without DeepSpeed
            return
        made = self._engine.global_steps - self._before
        if not self.expected <= made <= self.expected + self.num_epochs:
            raise TrainsOtherwiseError(
                f"its optimizer made {made} steps where the candidate makes {self.expected}; call the engine's step() "
                "after every micro-step, and leave it to ladder to accumulate"
            )


_BY_HAND = (
    "its loop accumulates by hand, with several backward passes before one step of its optimizer; give their number to "
    "accelerate, as Accelerator(gradient_accumulation_steps=N), and train within accelerator.accumulate(model)"
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

    for owner, name in engine_methods("backward"):
        wrap(owner, name, noted)


def facts_of_loop(kind: ScriptKind, model: Any, loader: DataLoader[Any], **known: Any) -> ScriptFacts:
    rebatched(loader, 1)  # what no trial can do is said by the look
    known = {"gradient_clipping": 0.0, "micro_batch": loader.batch_size or 1, **known}
    return ScriptFacts(kind=kind, **model_facts(model), **sample_facts(Samples(loader)), **known)
