"""DeepSpeed's operators for the trials of one tune: each is built once a trial needs it, or beside earlier trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ladder.backends.registry import backend_of
from ladder.candidates import Rung
from ladder.doctor.builds import fix_of_build
from ladder.errors import EnvironmentFaultError
from ladder.launch.operator_builds import OperatorBuilds
from ladder.tuning.tune_events import Note, Subscriber
from ladder.workload.workload import OptimizerName


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
