"""DeepSpeed's operators for the trials of one tune: each is built once a trial needs it, or beside earlier trials.

A build takes up to a minute, so trials that need none come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ladder.backends.registry import backend_of
from ladder.candidates import Rung
from ladder.doctor.builds import fix_of_build
from ladder.errors import EnvironmentFaultError
from ladder.events.outcome import Record
from ladder.launch.operator_builds import OperatorBuilds
from ladder.machine.described import Machine
from ladder.search.auto import auto, hopeful_engines
from ladder.search.policy import Measure, Strategy
from ladder.search.relevance import relevant
from ladder.search.space import Space
from ladder.search.time_left import TimeLeft, within
from ladder.tuning.reach import less_disproved
from ladder.tuning.tune_events import Note, Subscriber
from ladder.workload.workload import OptimizerName, Workload


class OperatorMissingError(Exception):
    """An operator cannot be built, so the rungs that need it cannot work here."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"DeepSpeed's {name} operator cannot be built: {reason}")
        self.name = name


class Operators:
    """Builds and loads operators for trials.

    `always` are those that every trial needs. `load` makes the processes that run trials load built ones.
    """

    def __init__(
        self,
        always: Sequence[str],
        optimizer: OptimizerName,
        environment: Mapping[str, str],
        load: Callable[[Sequence[str]], None],
        tell: Subscriber,
        cancelled: Callable[[], bool],
    ) -> None:
        self._always, self._optimizer = tuple(always), optimizer
        self._builds, self._load = OperatorBuilds(environment), load
        self._tell, self._cancelled = tell, cancelled
        self._begin(self._always)

    def foresee(self, rungs: Sequence[Rung]) -> None:
        """Build what later trials of `rungs` may need beside what runs now."""
        for rung in rungs:
            self._begin(self._of(rung), beside_trials=True)

    def are_ready(self, rung: Rung) -> bool:
        """Whether a trial of `rung` waits for no build."""
        return self._builds.have_ended((*self._always, *self._of(rung)))

    def need(self, rung: Rung) -> None:
        """Wait until the operators for a trial of `rung` are built, and have them loaded.

        OperatorMissingError if one cannot be built; EnvironmentFaultError if that is one which every trial needs.
        """
        names = (*self._always, *self._of(rung))
        self._begin(names)
        built = self._builds.wait(names, self._cancelled)
        if self._cancelled():  # a cancelled build says nothing about the operator
            return
        for name, reason in built.items():
            if reason is None:
                continue
            if name in self._always:
                fix = fix_of_build(name, reason)
                raise EnvironmentFaultError(
                    f"DeepSpeed's {name} operator cannot be built ({reason}); {fix}, and try again."
                )
            raise OperatorMissingError(name, reason)
        self._load(names)

    def _of(self, rung: Rung) -> tuple[str, ...]:
        return backend_of(rung).operators(rung, self._optimizer)

    def close(self) -> None:
        """Stop the builds that nothing waits for any more."""
        self._builds.close()

    def _begin(self, names: Sequence[str], *, beside_trials: bool = False) -> None:
        if new := self._builds.begin(names, beside_trials=beside_trials):
            self._tell(Note(f"Building DeepSpeed operators unless they are built already: {', '.join(new)}."))


@dataclass(frozen=True, kw_only=True)
class Building:
    """The builds of a tune of `space`."""

    operators: Operators | None
    """None where trials need none, as on a simulated machine."""
    machine: Machine
    space: Space
    aside: Space
    """The space whose trials fill the time; it may be wider."""

    def foresee(self, records: Sequence[Record]) -> None:
        """Build beside the next trial what later ones may need.

        Not beside the first, in which nothing is known yet of who may win: it came out 38 % slower than its proof with
        a build beside it (measured on an H100, Llama-3.2-1B at stage 3). And not on a CPU: a rank needs all cores.
        """
        if records and self.operators is not None and self.machine.device == "cuda":
            self.operators.foresee([engine.rung for engine in hopeful_engines(self.space, records)])

    def before(
        self,
        decision: Measure,
        strategy: Strategy,
        records: Callable[[], Sequence[Record]],
        time_left: Callable[[Sequence[Record]], TimeLeft | None],
    ) -> Measure | None:
        """What can be measured while an operator is built that `decision` needs; None if it waits for nothing.

        `records` gives those of `aside`. Strategies other than the default have an order of their own, which they keep.
        """
        operators = self.operators
        if operators is None or self.machine.device != "cuda" or strategy is not auto:
            return None
        operators.foresee([decision.engine.rung])
        if operators.are_ready(decision.engine.rung):
            return None
        ready = tuple(engine for engine in self.aside.engines if operators.are_ready(engine.rung))
        if not ready:
            return None
        space = replace(self.aside, engines=ready)
        known = less_disproved(relevant(space, records()))
        left = time_left(known)
        found = auto(space, known) if left is None else within(auto, space, known, left)
        return found if isinstance(found, Measure) else None


def operators_of_every_trial(workload: Workload) -> tuple[str, ...]:
    """Those that a script loads itself; a model's trials need none (`trial.backends`)."""
    return workload.script.facts.operators if workload.script is not None else ()
