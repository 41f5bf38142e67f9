"""When operators are built: those of a trial before it, those of others beside it, and no more of them than that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from helpers import bundled_workload
from helpers.searches import fitting, make_space

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.errors import EnvironmentFaultError
from ladder.machine.described import Machine
from ladder.search.auto import hopeful_engines
from ladder.tuning import operators
from ladder.tuning.operators import OperatorMissingError, Operators
from ladder.tuning.preparation import without_operator
from ladder.tuning.tune_events import ignore
from ladder.units import GIB

OFFLOADED, ON_GPU = RUNGS_BY_NAME["zero2+opt-cpu"], RUNGS_BY_NAME["zero2"]


class Builds:
    """Every build ends at once, as `ends` says."""

    def __init__(self, ends: dict[str, str]) -> None:
        self.begun: list[str] = []
        self.beside_trials: list[str] = []
        self._ends = ends

    def begin(self, names: Iterable[str], *, beside_trials: bool) -> list[str]:
        new = [name for name in names if name not in self.begun]
        self.begun += new
        self.beside_trials += new if beside_trials else []
        return new

    def wait(self, names: Sequence[str], _: Callable[[], bool]) -> dict[str, str | None]:
        return {name: self._ends.get(name) for name in names}


class Bench:
    """Operators whose builds are not real, and what they have loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool = False, **ends: str) -> None:
        self.builds, self.loaded = Builds(ends), list[str]()
        monkeypatch.setattr(operators, "OperatorBuilds", lambda _: self.builds)
        self.operators = Operators(["shm_comm"], "adamw", {}, self.loaded.extend, ignore, lambda: cancelled)


def test_a_trial_waits_for_its_own_operators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.operators.need(ON_GPU)
    assert bench.builds.begun == bench.loaded == ["shm_comm"]
    bench.operators.need(OFFLOADED)
    assert bench.builds.begun == ["shm_comm", "cpu_adam"]
    assert bench.loaded[-1] == "cpu_adam"


def test_what_is_foreseen_is_built_but_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.operators.foresee([ON_GPU, OFFLOADED])
    assert bench.builds.begun == ["shm_comm", "cpu_adam"]
    assert bench.builds.beside_trials == ["cpu_adam"]
    assert bench.loaded == []


def test_an_operator_that_cannot_be_built_costs_its_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, cpu_adam="there is no compiler")
    with pytest.raises(
        OperatorMissingError, match="cpu_adam operator cannot be built: there is no compiler"
    ) as missing:
        bench.operators.need(OFFLOADED)
    machine = Machine(device="cuda", world_size=4, memory_limit=GIB, host_memory=GIB, num_cores=8)
    found = without_operator(machine, [ON_GPU, OFFLOADED], bundled_workload("tiny-llama"), missing.value)
    assert found.unsupported == {"zero2+opt-cpu": str(missing.value)}


def test_an_operator_of_every_trial_that_cannot_be_built_ends_the_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, shm_comm="there is no compiler")
    with pytest.raises(EnvironmentFaultError, match=r"shm_comm operator cannot be built \(there is no compiler\); "):
        bench.operators.need(ON_GPU)


def test_a_build_that_the_user_ended_says_nothing_of_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, cancelled=True, cpu_adam="its build was stopped")
    bench.operators.need(OFFLOADED)
    assert bench.loaded == []


def test_only_engines_that_may_still_win_are_hopeful() -> None:
    space = make_space("zero2", "zero2+opt-cpu", memory_limit=80 * GIB)
    assert [engine.key for engine in hopeful_engines(space, ())] == ["zero2", "zero2+opt-cpu"]
    best = next(each for each in space.candidates if each.engine.key == "zero2" and each.micro_batch == 1)
    slow, unbeatable = (replace(fitting(space, best), tokens_per_second=speed) for speed in (1.0, 1e9))
    assert "zero2+opt-cpu" in [engine.key for engine in hopeful_engines(space, [slow])]
    assert hopeful_engines(space, [unbeatable]) == []
