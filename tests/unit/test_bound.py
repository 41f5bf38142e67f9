"""How close an answer is to the limit of matrix products: the parts of its step are measured, derived, or predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_candidate, there
from helpers.searches import fitting, make_space

from ladder.candidates import Candidate
from ladder.cli.explain import bound_document, bound_lines
from ladder.events.outcome import Record
from ladder.machine.machine_speed import flops_per_token
from ladder.search.bound import Bound, bound
from ladder.search.space import Space

RATE = 600e12
"""Operations per second: what an H200 reaches in large products."""
SPACE = make_space("zero0", "zero3")
CHECKPOINTED = make_candidate("zero3", micro_batch=4)


def proof(candidate: Candidate, space: Space = SPACE, rate: float | None = RATE) -> Record:
    """A proof of `candidate` that takes four times as long as its products."""
    work = space.workload.tokens_per_step * flops_per_token(space.workload)
    step = 4 * work / space.world_size / RATE
    micro = step / (candidate.accumulation + 1)  # the optimizer takes as long as a micro-step
    record = fitting(space, candidate, accumulate_seconds=micro, boundary_seconds=2 * micro, matrix_flops=rate)
    return replace(record, purpose="proof", tokens_per_second=space.workload.tokens_per_step / step)


def bound_of(candidate: Candidate) -> Bound:
    record = proof(candidate)
    return there(bound(SPACE, [replace(record, purpose="measure"), record], record))


def test_a_step_four_times_as_long_as_its_products_has_a_quarter_of_the_limit_and_parts_that_add_up_to_it() -> None:
    found = bound_of(CHECKPOINTED)
    assert found.share == pytest.approx(0.25)
    assert proof(CHECKPOINTED).tokens_per_second == pytest.approx(found.share * found.tokens_per_second)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_seconds, rel=0.02)
    assert all(part.seconds > 0 for part in found.parts)


def test_there_is_no_limit_where_the_proof_did_not_time_products() -> None:
    record = proof(CHECKPOINTED, rate=None)
    assert bound(SPACE, [record], record) is None


def test_the_command_says_the_share_and_the_parts_from_the_largest_to_the_least() -> None:
    record, found = proof(CHECKPOINTED), bound_of(CHECKPOINTED)
    said = bound_lines(record, found, "cuda")
    assert said[0].startswith(f"{CHECKPOINTED.key} trains ")
    assert ": 25% of the " in said[0]
    assert "600 TFLOP/s in products of the model's sizes on each GPU" in said[1]
    shares = [int(line.split("%")[0]) for line in said[3:]]
    assert shares == sorted(shares, reverse=True)
    assert bound_document(record, found)["share"] == 0.25
