"""Steps that an earlier tune of the same workload measured here are not measured again, once the first trial agrees."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload, there
from helpers.scripts import make_script, script_workload
from helpers.searches import fitting, make_space, out_of_memory

from ladder.candidates import Engine
from ladder.events.outcome import Record
from ladder.machine.described import Machine
from ladder.search.auto import auto
from ladder.search.belief import believe
from ladder.search.decisions import Measure
from ladder.search.space import Space, fastest
from ladder.tuning.known import EarlierSteps, learn
from ladder.units import GIB

WORKLOAD = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64)
MACHINE = Machine(device="cpu", world_size=4, memory_limit=80 * GIB, host_memory=1024 * GIB, num_cores=64)
SPACE = make_space("zero1", "zero2", "zero3", workload=WORKLOAD)
KEY = "zero2 ckpt=on mb=8"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_CACHE", str(tmp_path / "cache"))


def steps(**changes: Any) -> EarlierSteps:
    return EarlierSteps(**{"machine": MACHINE, "workload": WORKLOAD, **changes})


def record(key: str = KEY, **changes: Any) -> Record:
    return fitting(SPACE, SPACE.by_key[key], **changes)


def test_what_a_tune_measured_is_known_to_tunes_with_another_batch_or_limit() -> None:
    steps().add([record()])
    seen = there(record().measurement)
    wanted = ((KEY, seen.accumulate_seconds, seen.boundary_seconds),)
    assert steps().read() == wanted
    assert steps(workload=replace(WORKLOAD, global_batch_size=256)).read() == wanted
    assert steps(machine=replace(MACHINE, memory_limit=40 * GIB)).read() == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": replace(WORKLOAD, seq_len=1024)},
        {"workload": bundled_workload("opt-1.3b", seq_len=2048, global_batch_size=64)},
        {"machine": replace(MACHINE, num_cores=32)},
        {"machine": replace(MACHINE, allocator={})},
        {"workload": script_workload(make_script())},
        {"machine": replace(MACHINE, num_nodes=2, elsewhere={"names": ["node#"]})},
    ],
    ids=["sequence length", "model", "cores", "allocator", "a script", "several nodes"],
)
def test_they_are_of_no_other_training_and_of_no_other_machine(changes: dict[str, Any]) -> None:
    steps().add([record()])
    assert steps(**changes).read() == ()


@pytest.mark.parametrize("slower", [1.01, 1.5])
def test_a_tune_that_contradicts_earlier_ones_replaces_all_that_they_said(tmp_path: Path, slower: float) -> None:
    steps().add([record(), record("zero1 ckpt=on mb=8")])
    space = replace(SPACE, earlier=steps().read())
    again = fitting(space, space.by_key[KEY], slower=slower)
    learn(MACHINE, space, [again], tmp_path / "run", lambda _event: None)
    assert len(steps().read()) == (2 if slower < 1.05 else 1)


def test_failures_proofs_and_what_lacked_memory_are_not_kept() -> None:
    lacking = [record(alloc_retries=1), record(peak_device=79 * GIB)]
    steps().add([*lacking, replace(record(), purpose="proof"), out_of_memory(SPACE.by_key[KEY])])
    assert steps().read() == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: [],
        lambda content: {**content, "facts": {}},
        lambda content: {**content, "steps": {KEY: [0.0, 1.0, time.time()]}},
        lambda content: {**content, "steps": {KEY: [None, "x", time.time()]}},
        lambda content: {**content, "steps": {KEY: [None, 1.0, time.time() - 40 * 86400]}},
    ],
    ids=["no object", "another machine", "no time at all", "no number", "older than a month"],
)
def test_a_damaged_stale_or_foreign_file_is_no_file(change: Callable[[dict[str, Any]], Any]) -> None:
    steps().add([record()])
    assert steps().read()
    (file,) = (Path(steps()._file.parent)).iterdir()
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert steps().read() == ()
    steps().add([record()])
    assert len(steps().read()) == 1


def test_without_a_cache_that_can_be_written_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_CACHE", "/proc/no-such-place")
    steps().add([record()])
    assert steps().read() == ()


def known(space: Space, *, slower: float = 1.001) -> Space:
    """The space of a second tune: all candidates were measured, `slower` than they are."""
    records = [fitting(space, candidate, slower=slower) for candidate in space.candidates]
    return replace(
        space,
        earlier=tuple(
            (each.candidate_key, each.measurement.accumulate_seconds, each.measurement.boundary_seconds)
            for each in records
            if each.measurement is not None
        ),
    )


def search(space: Space, *, slower: float = 1.0) -> list[Record]:
    """All trials, on a machine that is `slower` than predicted."""
    records: list[Record] = []
    while isinstance(decision := auto(space, records), Measure):
        trial = f"{len(records):04}"
        records += [fitting(space, each, slower=slower, trial=trial) for each in decision.candidates]
    return records


def test_where_all_is_known_and_the_first_trial_confirms_it_that_is_the_only_one() -> None:
    usual, again = search(SPACE), search(known(SPACE))
    best, same = there(fastest(usual)), there(fastest(again))
    assert len({each.trial for each in again}) == 1 < len({each.trial for each in usual})
    assert same.tokens_per_second == pytest.approx(best.tokens_per_second, rel=0.02)


@pytest.mark.parametrize("slower", [0.5, 0.9, 1.1, 2.0])
def test_a_machine_that_is_as_fast_as_before_counts_and_another_is_measured_as_if_nothing_were_known(slower) -> None:
    space = known(SPACE, slower=slower)
    first = fitting(space, space.by_key[KEY])
    assert believe(space, ()).earlier.steps
    assert believe(space, [first]).earlier.steps == {}
    assert believe(space, [first]).of_this_tune.space.earlier == ()
    assert len(search(space)) > 1


def test_until_a_trial_confirms_them_earlier_steps_only_decide_what_comes_first() -> None:
    space = known(SPACE)
    another = fitting(space, space.by_key["zero3 ckpt=on mb=2"])
    few = replace(space, earlier=tuple(each for each in space.earlier if each[0] != another.candidate_key))
    belief = believe(few, [another])
    assert belief.earlier.steps
    assert belief.earlier.pace is None
    assert math.isinf(belief.outlook(space.by_key[KEY]).most)
    assert belief.of_this_tune.space.earlier == ()


def test_the_own_times_of_a_run_that_is_resumed_confirm_nothing_of_earlier_tunes() -> None:
    space = known(SPACE, slower=1.0)
    own = fitting(space, space.by_key[KEY])
    belief = believe(space, [own])
    assert belief.earlier.steps
    assert belief.earlier.pace is None
    assert believe(known(SPACE), [own]).earlier.pace == pytest.approx(1 / 1.001)


def test_a_step_that_lacked_memory_confirms_and_contradicts_nothing() -> None:
    space = known(SPACE)
    lacks: list[dict[str, Any]] = [{"alloc_retries": 1}, {"peak_device": 79 * GIB}]
    for lack in lacks:
        belief = believe(space, [fitting(space, space.by_key[KEY], slower=2.0, **lack)])
        assert belief.earlier.steps
        assert belief.earlier.pace is None


def test_an_engine_that_only_earlier_tunes_measured_is_a_ceiling_too() -> None:
    space = make_space("zero2", "zero3", "zero3+opt-cpu")
    measured = known(replace(space, engines=space.engines[:1])).earlier
    first = fitting(space, space.by_key["zero2 ckpt=on mb=16"])
    belief = believe(replace(space, earlier=measured), [first])
    assert Engine(space.engines[0].rung) in belief.known_engines
    outlook = belief.outlook(space.by_key["zero3+opt-cpu ckpt=on mb=4"])
    assert [each.candidate.key for each in outlook.ceilings] == ["zero2 ckpt=on mb=4"]
