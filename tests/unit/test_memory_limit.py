"""Which training is held to the limit of its tune, and what torch's allocator may have of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import make_candidate, make_measurement, make_record, space_on
from helpers.answers import answer
from helpers.scripts import make_script, script_workload
from helpers.tunes import TWO_RANKS, ZERO1_AND_ZERO2

from ladder.emit.config import best_config
from ladder.events.memory_limit import for_torch, slack
from ladder.runs.snapshot import space_from_dict, space_to_dict
from ladder.tuning.answer_options import RunOptions
from ladder.tuning.answering import answer_of
from ladder.tuning.script_run import limits_in
from ladder.units import GIB, MIB

AS_TUNED, LIFTED = RunOptions(), RunOptions(memory_limit=False)


def test_torch_leaves_room_for_what_lies_outside_and_a_little_more() -> None:
    assert slack(8 * GIB) == 64 * MIB
    assert slack(80 * GIB) == int(0.4 * GIB)
    assert for_torch(80 * GIB, outside=2 * GIB, reserved=60 * GIB) == 78 * GIB - slack(80 * GIB)


def test_torch_has_at_least_what_the_proof_reserved_but_never_more_than_the_limit_leaves() -> None:
    assert for_torch(80 * GIB, outside=2 * GIB, reserved=int(77.9 * GIB)) == int(77.9 * GIB)
    assert for_torch(80 * GIB, outside=2 * GIB, reserved=79 * GIB) == 78 * GIB


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
    stored = replace(machine, host_memory=GIB)  # of the machine itself, a run folder keeps only some figures
    found = answer_of(proof, workload, stored, space, {}, Path("run"), [proof])
    assert found.is_limited is (limit < 4 * GIB)
