"""What is known before any trial, against what GPUs recorded: sweeps of whole models, of adapters, without DeepSpeed.

`python benchmarks/physics.py` prints the same errors of every row, rung by rung.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from physics import ADAPTERS, Errors, Seen, errors_of, of_sweep
from recorded import SWEEPS, recorded_sweeps

EVERY = 5
"""One row in so many is compared."""
MOST_MEMORY = 0.015
ROUGH_MEMORY = {"zero1": 0.025, "zero3+param-cpu+opt-cpu": 0.05}
"""Mean errors of allocated memory, and of the two rungs whose memory the model knows less well."""
LEFT_OUT = ("24gib", "allocator")
"""Parts of the names of sweeps whose candidates another sweep or tests/data has too."""


def rows() -> Iterator[Seen]:
    for folder in (SWEEPS, ADAPTERS, SWEEPS / "plain"):
        for sweep in recorded_sweeps((1,), every_cap=False, folder=folder):
            name = sweep.name.split(",")[0]
            if not any(part in name for part in LEFT_OUT):
                fitting = [(key, row) for key, row in sweep.rows.items() if row["outcome"] == "fits"]
                # A sweep makes its space anew, sorted by predicted memory, whenever it is asked.
                once: Any = SimpleNamespace(workload=sweep.workload, machine=sweep.machine, space=cache(sweep.space))
                yield from (of_sweep(name, once, key, row) for key, row in fitting[::EVERY])


@dataclass(frozen=True)
class Group:
    """The rows of a rung on one GPU or on several, whole or with adapters."""

    rung: str
    ranks: str
    trains: str


@pytest.fixture(scope="module")
def groups() -> dict[Group, list[Errors]]:
    found: defaultdict[Group, list[Errors]] = defaultdict(list)
    for seen in rows():
        rung = seen.candidate.engine.rung.name
        trains = "adapters" if seen.workload.lora else "all"
        found[Group(rung, "one" if seen.ranks == 1 else "several", trains)].append(errors_of(seen))
    return dict(found)


def size(values: Iterable[float]) -> float:
    return statistics.fmean(map(abs, values))


def test_there_is_something_to_compare(groups: dict[Group, list[Errors]]) -> None:
    assert sum(map(len, groups.values())) > 120
    assert len({group.rung for group in groups}) == 13
    assert {f"{group.ranks} {group.trains}" for group in groups} == {"one all", "several all", "one adapters"}


def test_allocated_memory_is_known_to_a_hundredth_or_two_but_of_one_rung(groups: dict[Group, list[Errors]]) -> None:
    for group, errors in groups.items():
        assert size(error.memory for error in errors) < ROUGH_MEMORY.get(group.rung, MOST_MEMORY), group
        assert max(abs(error.memory) for error in errors) < 0.08, group


def test_host_memory_is_known_to_a_tenth_and_better_where_the_optimizer_alone_is_offloaded(
    groups: dict[Group, list[Errors]],
) -> None:
    for group, errors in groups.items():
        if "opt-cpu" in group.rung:
            on_host = [error.host for error in errors if error.host is not None]
            assert size(on_host) < (0.11 if "param-cpu" in group.rung else 0.04), group


def test_steps_take_as_long_as_recorded_within_a_third_on_average_with_and_without_the_optimizer(
    groups: dict[Group, list[Errors]],
) -> None:
    for group, errors in groups.items():
        for number in (0, -1):
            own = [error.steps[number] for error in errors if len(error.steps) > 1]
            if len(own) > 2 and group.rung != "fsdp2":  # which on one GPU gathers what it has
                assert 0.65 < math.exp(statistics.fmean(own)) < 1.36, (group, number)
                assert statistics.pstdev(own) < 0.35, (group, number)


def test_the_price_of_checkpointing_is_known(groups: dict[Group, list[Errors]]) -> None:
    errors = [each for group in groups.values() for each in group if len(each.steps) > 1]
    checkpointed, whole = (
        statistics.fmean(each.steps[0] for each in errors if each.seen.candidate.checkpointed == share)
        for share in (1, 0)
    )
    assert abs(checkpointed - whole) < 0.1
