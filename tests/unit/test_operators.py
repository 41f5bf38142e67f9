"""When operators are built, no more of them than are needed, and what is measured meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from helpers import bundled_workload, machine_with
from helpers.searches import decide, fitting, make_space

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.errors import EnvironmentFaultError
from ladder.events.outcome import Record
from ladder.search.auto import auto
from ladder.search.policy import Measure, walk
from ladder.search.space import Space, of_main_backend
from ladder.step.counted import Device
from ladder.tuning import operators
from ladder.tuning.obstacles import without_operator
from ladder.tuning.operators import Building, OperatorMissingError, Operators
from ladder.tuning.tune_events import ignore
from ladder.units import GIB

ROOMY = make_space("zero2", "zero2+opt-cpu", memory_limit=80 * GIB)
SLOW = replace(fitting(ROOMY, ROOMY.by_key["zero2 ckpt=on mb=1"]), tokens_per_second=1.0)
OFFLOADED, ON_GPU = RUNGS_BY_NAME["zero2+opt-cpu"], RUNGS_BY_NAME["zero2"]


class Builds:
    """Every build ends at once, as `ends` says, unless it is among those `running`."""

    def __init__(self, ends: dict[str, str]) -> None:
        self.begun: list[str] = []
        self.beside_trials: list[str] = []
        self._ends = ends
        self.running = set[str]()

    def have_ended(self, names: Iterable[str]) -> bool:
        return all(name in self.begun and name not in self.running for name in names)

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

    def building(self, space: Space, aside: Space, *, device: Device = "cuda") -> Building:
        machine = machine_with(space.world_size, device)
        return Building(operators=self.operators, machine=machine, space=space, aside=aside)


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
    found = without_operator(machine_with(4), [ON_GPU, OFFLOADED], bundled_workload("tiny-llama"), missing.value)
    assert found.unsupported == {"zero2+opt-cpu": str(missing.value)}


def test_an_operator_of_every_trial_that_cannot_be_built_ends_the_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, shm_comm="there is no compiler")
    with pytest.raises(EnvironmentFaultError, match=r"shm_comm operator cannot be built \(there is no compiler\); "):
        bench.operators.need(ON_GPU)


def test_a_build_that_the_user_ended_says_nothing_of_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, cancelled=True, cpu_adam="its build was stopped")
    bench.operators.need(OFFLOADED)
    assert bench.loaded == []


@pytest.mark.parametrize(
    ("records", "device", "begun"), [([SLOW], "cuda", True), ([], "cuda", False), ([SLOW], "cpu", False)]
)
def test_builds_begin_after_the_first_trial_of_a_gpu(
    records: list[Record], device: Device, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch)
    bench.building(ROOMY, ROOMY, device=device).foresee(records)
    assert ("cpu_adam" in bench.builds.beside_trials) == begun


TIGHT = make_space("zero3+opt-cpu", "fsdp2", memory_limit=40 * GIB)
"""Where the fastest rung of DeepSpeed needs an operator, and one without DeepSpeed needs none."""


def waiting(bench: Bench, space: Space) -> Measure:
    """The decision of a tune that is to wait for its operator."""
    decision = decide(space, [])
    assert decision.engine.key == "zero3+opt-cpu"
    bench.builds.running.add("cpu_adam")
    return decision


def test_while_an_operator_is_built_another_engine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, space = Bench(monkeypatch), of_main_backend(TIGHT)
    building = bench.building(space, TIGHT)
    decision = waiting(bench, space)
    meanwhile = building.before(decision, auto, list, lambda _: None)
    assert meanwhile is not None
    assert meanwhile.engine.key == "fsdp2"
    known = [fitting(TIGHT, candidate) for candidate in TIGHT.of_engine(meanwhile.engine)]
    assert building.before(decision, auto, lambda: known, lambda _: None) is None, "nothing is left but to wait"
    assert building.before(decision, walk, list, lambda _: None) is None, "other strategies keep their order"
    alone = bench.building(space, space)
    assert alone.before(decision, auto, list, lambda _: None) is None, "every engine waits"
    bench.builds.running.clear()
    assert building.before(decision, auto, list, lambda _: None) is None, "the operator is built"
