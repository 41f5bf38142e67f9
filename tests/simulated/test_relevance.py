"""A run folder may hold what other options allowed: it answers for what is asked now, as a new one would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_candidate, make_measurement, make_record
from helpers.searches import make_space
from helpers.tunes import on_paper

import ladder
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.errors import NothingFitsError
from ladder.events.outcome import Outcome
from ladder.search.belief import believe
from ladder.search.relevance import relevant
from ladder.search.space import REFUSED, Space
from ladder.units import GIB
from ladder.workload.workload import Workload


def tuned(folder: Path, **options: Any) -> ladder.Tuned:
    asked: dict[str, Any] = {"gpus": 2, "global_batch_size": 32, "machine": "a100-40"} | options
    return on_paper(folder, "llama-2-7b", backend="deepspeed", **asked)


def answer_of(found: ladder.Tuned) -> str:
    try:
        return found.best.candidate.key
    except NothingFitsError:
        return "nothing fits"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"allow": ["bf16-states"], "global_batch_size": 64}, {"documented": True, "global_batch_size": 64}),
        ({}, {"micro_batches": [1], "rungs": ["zero2+opt-cpu"]}),
        ({}, {"host_memory": "20GiB"}),
        ({"host_memory": "20GiB", "global_batch_size": 16}, {"global_batch_size": 16}),
    ],
    ids=lambda options: "-".join(options) or "as it comes",
)
def test_a_folder_that_knows_more_gives_the_answer_of_a_new_one(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any]
) -> None:
    first = tuned(tmp_path / "used", **before)
    again, fresh = tuned(tmp_path / "used", **now), tuned(tmp_path / "new", **now)
    assert answer_of(again) == answer_of(fresh) != answer_of(first)
    assert set(again.trials["rung"]) == set(fresh.trials["rung"])


def test_another_strategy_begins_with_all_that_is_known(tmp_path: Path) -> None:
    assert answer_of(tuned(tmp_path)) == answer_of(tuned(tmp_path, strategy="walk"))


def test_on_another_drive_what_swaps_is_measured_and_proven_again_and_without_one_its_answer_is_none(
    tmp_path: Path,
) -> None:
    little: dict[str, Any] = {"gpus": 1, "global_batch_size": 2, "host_memory": "60GiB"}
    drives = [tmp_path / "one", tmp_path / "one", tmp_path / "other"]
    trials = []
    for drive in drives:
        drive.mkdir(exist_ok=True)
        found = tuned(tmp_path / "used", nvme_path=drive, **little)
        trials.append(found.trials.query("status == 'answer'")["trial"].item())
        assert found.deepspeed_config()["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(drive)
    assert trials[0] == trials[1] < trials[2]
    assert answer_of(tuned(tmp_path / "used", **little)) == "nothing fits"


@pytest.fixture
def space(llama_like: Callable[..., Workload]) -> Space:
    return make_space(
        "zero2", workload=llama_like(), world_size=2, memory_limit=40 * GIB, host_memory=100 * GIB, micro_batches=(1, 2)
    )


def test_settings_of_an_engine_s_knobs_belong_to_it(space: Space) -> None:
    knobs = (("reduce_bucket_size", 1000),)
    own, other = (
        make_record(replace(make_candidate(rung), engine=Engine(RUNGS_BY_NAME[rung], knobs)))
        for rung in ("zero2", "zero3")
    )
    assert relevant(space, [own, other]) == [own]


def test_a_refusal_falls_when_the_host_may_give_what_was_missing(space: Space) -> None:
    outcomes = [
        Outcome(kind="host_oom", moment=REFUSED, bytes_asked=needed * GIB, bytes_free=50 * GIB) for needed in (90, 200)
    ]
    small, large = (make_record(make_candidate("zero2"), "host_oom", outcome=outcome) for outcome in outcomes)
    assert relevant(space, [small, large]) == [large]


def test_what_ran_out_of_host_memory_is_tried_again_when_there_is_more(space: Space) -> None:
    died = Outcome(kind="host_oom", moment="step", host_memory=50 * GIB)
    record = make_record(make_candidate("zero2"), "host_oom", outcome=died)
    assert relevant(replace(space, host_memory=52 * GIB), [record]) == [record]
    assert relevant(space, [record]) == []


def test_what_held_more_host_memory_than_is_allowed_now_also_while_it_loaded_weights_does_not_fit(space: Space) -> None:
    loaded = make_measurement(peak_host=90 * GIB, held_host=20 * GIB)
    record = make_record(make_candidate("zero2"), measurement=loaded)
    assert relevant(space, [record]) == [record]
    (now,) = relevant(replace(space, host_memory=50 * GIB), [record])
    assert (now.outcome.kind, now.tokens_per_second) == ("host_oom", None)
    assert "used 90.00 GiB of host memory, and they may use 50.00 GiB (--host-memory)" in now.outcome.sentence
    # Loading does not count for what other engines would need.
    alike = make_record(make_candidate("zero2"), measurement=make_measurement(peak_host=20 * GIB))
    for candidate in space.candidates:
        assert believe(space, [record]).outlook(candidate).host == believe(space, [alike]).outlook(candidate).host


def test_ranks_on_the_cpu_hold_on_the_host_what_they_hold(space: Space) -> None:
    record = make_record(make_candidate("zero2"), measurement=make_measurement(peak_device=90 * GIB, peak_host=1))
    on_cpu = replace(space, device="cpu", world_size=2)
    assert relevant(replace(on_cpu, host_memory=200 * GIB), [record]) == [record]
    (now,) = relevant(replace(on_cpu, host_memory=100 * GIB), [record])
    assert now.outcome.kind == "host_oom"


def test_what_the_user_was_asked_to_mend_is_tried_again_by_the_next_start(space: Space) -> None:
    kinds: list[Any] = ["disk_full", "pinned_oom"]
    records = [make_record(make_candidate("zero2"), kind, trial="0003") for kind in kinds]
    assert relevant(space, records, since="0004") == []
    assert relevant(space, records, since="0003") == relevant(space, records) == records
