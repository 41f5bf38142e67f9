"""What a training whose memory ran out goes on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import make_candidate, make_measurement, make_record, space_on, there
from helpers.answers import answer
from helpers.scripts import make_script, script_workload
from helpers.tunes import TWO_RANKS, ZERO1_AND_ZERO2

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate
from ladder.emit.config import best_config
from ladder.emit.settings import settings_of
from ladder.events.memory_limit import for_torch
from ladder.options.answer import RunOptions
from ladder.runs.snapshot import space_from_dict, space_to_dict
from ladder.tuning import step_down
from ladder.tuning.answering import answer_of
from ladder.tuning.script_run import limits_in
from ladder.tuning.step_down import RunPlan, smaller
from ladder.units import GIB

RUNGS = ("zero1", "zero2", "zero2+opt-cpu", "zero3", "zero3+param-cpu", "zero3+opt-cpu")
LEAN, NOT_LEAN = "zero3+param-cpu+opt-cpu+lean", "zero3+param-cpu+opt-cpu"
WORKLOAD = script_workload(make_script())
SPACE, _ = space_on(WORKLOAD, TWO_RANKS, [RUNGS_BY_NAME[name] for name in (*RUNGS, LEAN, NOT_LEAN)], [1, 8])

SEEN = make_measurement()


def candidate_on(rung: str, micro_batch: int = 8) -> Candidate:
    return make_candidate(rung, checkpointing=False, micro_batch=micro_batch, accumulation=16 // micro_batch)


def plan_on(rung: str) -> RunPlan:
    start = RunPlan(settings=settings_of(answer(device="cpu")), candidate=candidate_on("zero2"), config={})
    return step_down._with(start, candidate_on(rung), SPACE)


@pytest.mark.parametrize(
    ("one", "other", "reads"),
    [
        ("zero1", "zero2", True),
        ("zero3", "zero3+param-cpu", True),
        ("zero2", "zero3", False),
        ("zero2", "zero2+opt-cpu", False),
        ("zero3", "zero3+opt-cpu", False),
        (NOT_LEAN, LEAN, False),
    ],
)
def test_only_engines_that_lay_a_checkpoint_out_alike_read_each_other_s(one: str, other: str, reads: bool) -> None:
    assert (plan_on(one).layout == plan_on(other).layout) is reads


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """zero2 held 4 GiB, zero1 almost as much; the fastest with less is at stage 3, and another at stage 2."""
    held = {
        candidate_on("zero2"): (4.0, 900.0),
        candidate_on("zero1"): (3.9, 950.0),
        candidate_on("zero3"): (2.0, 800.0),
        candidate_on("zero2", 1): (3.0, 500.0),
    }
    records = [
        make_record(
            each,
            # The less is on the GPU, the more is on the host.
            measurement=make_measurement(peak_device=int(size * GIB), peak_host=int((10 - size) * GIB)),
            tokens_per_second=speed,
        )
        for each, (size, speed) in held.items()
    ]
    result: Any = SimpleNamespace(result=SimpleNamespace(space=SPACE, records=records))
    monkeypatch.setattr(step_down, "stored_output", lambda folder: result)


@pytest.mark.parametrize(("checkpoint", "rung", "micro_batch"), [(False, "zero3", 8), (True, "zero2", 1)])
def test_with_a_checkpoint_only_what_can_read_it_is_taken(
    checkpoint: bool, rung: str, micro_batch: int, measured: None
) -> None:
    plan = plan_on("zero2")
    found = there(smaller(Path("run"), plan, {plan.candidate.key}, checkpoint, "gpu_oom"))
    assert found.candidate == candidate_on(rung, micro_batch)
    assert found.settings.stage == found.config["zero_optimization"]["stage"] == RUNGS_BY_NAME[rung].stage
    batch = found.settings.micro_batch * found.settings.accumulation
    assert batch == plan.settings.micro_batch * plan.settings.accumulation == 16


@pytest.mark.parametrize("limit", [0, 5 * GIB])
def test_a_limit_stays_and_leaves_torch_what_the_next_candidate_needs(limit: int, measured: None) -> None:
    plan = replace(plan_on("zero2"), memory_limit=limit, torch_limit=limit)
    found = there(smaller(Path("run"), plan, {plan.candidate.key}, checkpoint=False, outcome="gpu_oom"))
    outside, reserved = SEEN.outside_torch, SEEN.peak_reserved
    assert (found.memory_limit, found.torch_limit) == (limit, for_torch(limit, outside, reserved) if limit else 0)


def test_a_candidate_that_was_tried_is_not_tried_again(measured: None) -> None:
    plan = plan_on("zero2")
    tried = {plan.candidate.key, candidate_on("zero2", 1).key}
    assert smaller(Path("run"), plan, tried, checkpoint=True, outcome="gpu_oom") is None


def test_where_the_host_s_memory_ran_out_a_candidate_that_takes_less_of_that_is_taken(measured: None) -> None:
    plan = plan_on("zero3")
    found = there(smaller(Path("run"), plan, {plan.candidate.key}, checkpoint=False, outcome="host_oom"))
    assert found.candidate == candidate_on("zero1")
    assert smaller(Path("run"), plan_on("zero2"), set(), checkpoint=False, outcome="host_oom") is None


# Which training is held to the limit of its tune, and what torch's allocator may have of it.

AS_TUNED, LIFTED = RunOptions(), RunOptions(memory_limit=False)


@pytest.mark.parametrize(
    ("limit", "reserved", "gib"), [(80, 60.0, 77.6), (80, 77.9, 77.9), (80, 79.0, 78.0), (8, 1.0, 6.0 - 1 / 16)]
)
def test_torch_leaves_a_little_of_the_limit_unless_the_proof_reserved_it_and_all_that_lies_outside(
    limit: int, reserved: float, gib: float
) -> None:
    assert for_torch(limit * GIB, outside=2 * GIB, reserved=int(reserved * GIB)) == pytest.approx(gib * GIB, rel=1e-6)


@pytest.mark.parametrize(
    ("is_limited", "asked", "limits"),
    [
        (True, AS_TUNED, (40 * GIB, for_torch(40 * GIB, 2 * GIB, 33 * GIB))),
        (True, LIFTED, (0, 0)),
        (False, AS_TUNED, (0, 0)),
    ],
)
def test_a_training_is_held_to_a_limit_below_the_whole_gpu_unless_that_is_lifted(
    is_limited: bool, asked: RunOptions, limits: tuple[int, int]
) -> None:
    section = best_config(answer(is_limited=is_limited))["ladder"]
    assert limits_in(section, asked) == limits


@pytest.mark.parametrize("limit", [GIB, 4 * GIB])
def test_the_answer_of_a_stored_tune_still_knows_whether_its_limit_was_below_what_there_was(limit: int) -> None:
    machine = replace(TWO_RANKS, memory_limit=limit, host_memory=10 * GIB)
    workload = script_workload(make_script())
    space = space_from_dict(space_to_dict(space_on(workload, machine, ZERO1_AND_ZERO2, [1])[0]))
    candidate = make_candidate("zero2", checkpointing=False, micro_batch=1, accumulation=16)
    proof = replace(make_record(candidate, measurement=make_measurement(), tokens_per_second=9.0), purpose="proof")
    found = answer_of(proof, space, {}, {}, Path("run"), [proof])
    assert found.is_limited is (limit < 4 * GIB)
