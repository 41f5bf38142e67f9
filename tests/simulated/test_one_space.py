"""`plan` and `tune` search the same candidates: they build their spaces by one function."""

from __future__ import annotations

from pathlib import Path

import pytest

from ladder.machine.lease import Leases
from ladder.options.plan import PlanOptions
from ladder.options.tune import TuneOptions
from ladder.search.space import Space
from ladder.simulation.paper_machine import machine_files, read_machine
from ladder.tuning.planning import plan_of
from ladder.tuning.run import space_of
from ladder.workload.source import bundled_models


def searched_by_a_tune(model: str, machine: str, folder: Path) -> Space:
    drive = folder if read_machine(machine).nvme_space else None
    options = TuneOptions(
        model=model, launcher="simulated", machine=machine, nvme_path=drive, output=folder / "best_config.json"
    )
    return space_of(options, Leases())


def planned(model: str, machine: str) -> Space:
    _, space = plan_of(PlanOptions(model=model, machine=machine), lambda note: None)
    return space


MODELS, MACHINES = tuple(bundled_models()), tuple(machine_files())
# Each model and each machine at least once.
PAIRS = [
    (MODELS[number % len(MODELS)], MACHINES[number % len(MACHINES)])
    for number in range(max(len(MODELS), len(MACHINES)))
]


@pytest.mark.parametrize(("model", "machine"), PAIRS)
def test_plan_and_tune_have_the_same_candidates(model: str, machine: str, tmp_path: Path) -> None:
    tune, plan = searched_by_a_tune(model, machine, tmp_path), planned(model, machine)
    assert [each.key for each in plan.candidates] == [each.key for each in tune.candidates]
    assert (plan.memory_limit, plan.host_memory) == (tune.memory_limit, tune.host_memory)
