"""What every way of taking hold of a script's training has in common."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ladder.events.protocol import CheckpointEvent, HeldEvent, LookedEvent, ScriptSpec, TrialSpec
from ladder.trial.gauge import Gauge
from ladder.trial.of_deepspeed import engine_methods
from ladder.trial.reporter import Reporter, now
from ladder.trial.script.loop_end import LoopEnd
from ladder.trial.script.options import has_trainer_options, setting
from ladder.trial.script.program import Program
from ladder.trial.script.saves import OF_LIBRARIES, Saves
from ladder.trial.wrapping import wrap
from ladder.workload.script import ScriptFacts, ScriptKind

Leave = Callable[[BaseException | None], NoReturn]
"""Ends the process with its report; no line of the script runs after it."""


class NotTakenHoldOfError(RuntimeError):
    """The script did not begin to train in a way that is known here."""

    is_sentence = True


class StepsMade:
    """Counts micro-steps at `backward` and optimizer steps at `step`, from `listen` on.

    All of them pass there: loss.backward(), accelerate's and DeepSpeed's engine. A backward pass inside another one, as
    checkpointing may make, is a part of it. An optimizer that steps several times after a backward pass, once for each
    of its groups, makes one step.
    """

    def __init__(self) -> None:
        self.micro_steps = self.optimizer_steps = 0
        self.accumulation = 0
        """Micro-steps of the optimizer step that had the most."""
        self.forwards = 0
        """Through an engine, of which gradients could be asked."""
        self.before_backward = list[Callable[[Any], None]]()
        """Called with what a micro-step's backward pass begins at, usually the loss."""
        self.schedule: Any = None
        """Of the learning rate, where the script gave it to its engine."""
        self.compared = set[str]()
        """What of the first training's plan was compared with the script's own."""
        self._is_passing, self._passes = False, 0

    def listen(self) -> None:
        wrap(torch.autograd, "backward", self._passed)
        register_optimizer_step_pre_hook(self._stepped)

    def _passed(self, own: Any, tensors: Any, *arguments: Any, **options: Any) -> None:
        if self._is_passing:
            own(tensors, *arguments, **options)
            return
        self.micro_steps += 1
        self._is_passing, self._passes = True, self._passes + 1
        try:
            for told in self.before_backward:
                told(tensors)
            own(tensors, *arguments, **options)
        finally:
            self._is_passing = False

    def _stepped(self, *_: Any) -> None:
        if self._passes:
            self.accumulation, self._passes = max(self.accumulation, self._passes), 0
            self.optimizer_steps += 1


@dataclass(frozen=True)
class Grip:
    """A rank that runs a script: what is asked of it, and how it ends."""

    spec: TrialSpec
    script: ScriptSpec
    reporter: Reporter
    gauge: Gauge
    leave: Leave
    began: float
    """On CLOCK_MONOTONIC, when the script was started."""
    path: str
    """Of the script's file."""
    digest: str
    """SHA-256 of that file."""
    modules: frozenset[str]
    """Those that were imported before the script was started."""
    saves: Saves
    program: Program
    holders: set[ScriptKind] = field(default_factory=set)
    """What the script was seen to use so far: the Trainer uses accelerate, which uses DeepSpeed."""
    made: StepsMade = field(default_factory=StepsMade)
    loop_end: LoopEnd = field(default_factory=LoopEnd)
    parsed: dict[str, int] = field(default_factory=dict)
    """Whole numbers that the script's parser of arguments found, by option."""

    @property
    def is_look(self) -> bool:
        return self.script.mode == "look"

    @property
    def is_run(self) -> bool:
        return self.script.mode == "run"

    @property
    def known_sizes(self) -> dict[int, int]:
        """Of samples, by index, as the look found them."""
        return self.script.facts.sizes if self.script.facts is not None else {}

    def looked(self, find: Callable[[], ScriptFacts]) -> NoReturn:
        """Report what `find` finds, and end."""
        try:
            known: dict[str, Any] = {
                "path": self.path,
                "digest": self.digest,
                "preparation_seconds": now() - self.began,
                "takes_options": has_trainer_options(self.parsed),
                "program": self.program.words,
                "launcher": self.program.launcher,
                "num_arguments": len(self.program.arguments),
            }
            known["modules"] = installed_since(self.modules)
            facts = replace(find(), **known)
            if not self.program.is_plain and facts.engine is not None and facts.engine.stage is None:
                facts = replace(facts, engine=None)
            seen = (facts.micro_batch, facts.accumulation)
            facts = replace(facts, numbers={name: value for name, value in self.parsed.items() if value in seen})
            if facts.kind != "trainer":  # whose arguments are changed where they are made
                facts = replace(facts, options=setting(self.parsed, facts))
            self.reporter.send(LookedEvent(t=now(), facts=facts))
        except BaseException as error:
            self.leave(error)
        self.leave(None)

    def held(self, by: ScriptKind, measure: Callable[[], Any]) -> NoReturn:
        """Take the training over: `measure`, report, and end. The script sees no error, so it can swallow none."""
        try:
            self.reporter.send(HeldEvent(t=now(), by=by))
            measure()
        except BaseException as error:
            self.leave(error)
        self.leave(None)

    def engine(self, make: Callable[[], Any]) -> Any:
        """What `make` makes of the script's model; memory that runs out there is reported before the script sees it."""
        if self.is_run:
            return make()
        self.reporter.phase("engine")
        try:
            return make()
        except BaseException as error:
            self.leave(error)


def too_few(grip: Grip) -> NotTakenHoldOfError:
    """Of a training that ends before enough of it is measured."""
    return NotTakenHoldOfError(
        f"the script's training ended after {grip.made.optimizer_steps} optimizer steps, before enough of them were "
        "measured: the first ones, which reserve memory, do not count; let it train for longer"
    )


def installed_since(before: frozenset[str]) -> tuple[str, ...]:
    """Installed modules that were imported since, in the order of their import; none of the script's own folder."""
    folders = tuple(each for each in sys.path if Path(each).name in OF_LIBRARIES)
    new = [(name, module) for name, module in list(sys.modules.items()) if name not in before and module is not None]
    return tuple(name for name, module in new if str(getattr(module, "__file__", None) or "").startswith(folders))


def name_moments(grip: Grip) -> None:
    """Let every engine say what it is doing. What goes wrong there in a trial is reported before the script sees it."""

    def named(moment: str, own: Any, *arguments: Any, **options: Any) -> Any:
        if moment == "forward" and torch.is_grad_enabled():
            grip.made.forwards += 1
        try:
            with grip.reporter.during(moment), grip.loop_end.paused():
                return own(*arguments, **options)
        except BaseException as error:
            grip.reporter.moment = moment
            if grip.is_run:  # the user's own training, which may have its own answer
                raise
            grip.leave(error)

    for owner, name in _parts_of_a_micro_step(grip.spec):
        wrap(owner, name, functools.partial(named, name))


def _parts_of_a_micro_step(spec: TrialSpec) -> list[tuple[Any, str]]:
    """The methods of the engine that do them. accelerate's model is wrapped only if there are other ranks."""
    if spec.uses_deepspeed:  # whose own wrappers hide their names
        return engine_methods("forward", "backward", "step")
    return [(DistributedDataParallel, "forward"), (Accelerator, "backward"), (AcceleratedOptimizer, "step")]


def note_checkpoints(grip: Grip) -> None:
    """Let every engine of a run report that it wrote or read a checkpoint."""

    def noted(own: Any, *arguments: Any, **options: Any) -> Any:
        done = own(*arguments, **options)
        # DeepSpeed's begins with the folder that was read: None where there was none.
        if not (isinstance(done, tuple) and done[0] is None):
            grip.reporter.send(CheckpointEvent(t=now()))
        return done

    of_accelerate = [(Accelerator, "save_state"), (Accelerator, "load_state")]
    of_deepspeed = engine_methods("save_checkpoint", "load_checkpoint")
    for owner, name in of_deepspeed if grip.spec.uses_deepspeed else of_accelerate:
        wrap(owner, name, noted)
