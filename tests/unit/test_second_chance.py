"""What ran out of memory late in its trial, and in pieces, is tried again alone where it may be the answer."""

from __future__ import annotations

from helpers import make_candidate, make_record
from helpers.searches import fitting, make_space

from ladder.candidates import Candidate
from ladder.events.outcome import Outcome, Record
from ladder.search.decisions import Measure, Stop
from ladder.search.policy import exhaustive
from ladder.search.second_chance import second_chance
from ladder.tuning.refusal import less_disproved
from ladder.units import GIB

SPACE = make_space("zero2")
SMALL = make_candidate("zero2", micro_batch=1, accumulation=16)
LARGE = make_candidate("zero2", micro_batch=4, accumulation=4)
BOTH = make_space("zero2", "zero3")
SLOW = make_candidate("zero3", micro_batch=1, accumulation=16)
OTHERS = [each for each in BOTH.candidates if each.engine != SMALL.engine or each.checkpointing != SMALL.checkpointing]
IN_PIECES = Outcome(kind="gpu_oom", moment="forward", sentence="no", bytes_asked=2 * GIB, bytes_free=3 * GIB)


def late(trial: str = "0001") -> Record:
    return make_record(LARGE, "gpu_oom", trial=trial, outcome=IN_PIECES)


def test_it_is_measured_again_alone_where_it_is_predicted_to_beat_the_best():
    decision = second_chance(SPACE, [fitting(SPACE, SMALL), late()])
    assert isinstance(decision, Measure)
    assert decision.candidates == (LARGE,)


def test_it_is_not_where_the_best_is_faster():
    other = make_candidate("zero2", checkpointing=False, micro_batch=4, accumulation=4)
    records = [fitting(SPACE, SMALL), late(), fitting(SPACE, other, trial="0002")]
    assert second_chance(SPACE, records) is None


def test_what_becomes_of_it_alone_is_final():
    assert second_chance(SPACE, [fitting(SPACE, SMALL), late(), late("0002")]) is None


def test_a_proof_that_ran_out_in_pieces_is_final_too():
    disproof = make_record(LARGE, "gpu_oom", trial="0003", purpose="proof", outcome=IN_PIECES)
    records = [fitting(SPACE, SMALL), late(), fitting(SPACE, LARGE, trial="0002"), disproof]
    assert second_chance(SPACE, less_disproved(records)) is None


def test_a_sweep_ends_with_second_chances():
    sizes = [candidate for candidate in SPACE.candidates if candidate not in (SMALL, LARGE)]
    slow = [fitting(SPACE, candidate, slower=50.0, trial="0002") for candidate in sizes]
    records = [fitting(SPACE, SMALL, slower=50.0), late(), *slow]
    decision = exhaustive(SPACE, records)
    assert isinstance(decision, Measure)
    assert decision.candidates == (LARGE,)
    assert isinstance(exhaustive(SPACE, [*records, late("0003")]), Stop)


def ran_out(share: float, candidate: Candidate = SMALL, trial: str = "0001") -> Record:
    """`candidate` lacked this share of the limit."""
    lacked = int(share * SPACE.memory_limit)
    outcome = Outcome(kind="gpu_oom", moment="backward", sentence="no", bytes_asked=GIB + lacked, bytes_free=GIB)
    return make_record(candidate, "gpu_oom", trial=trial, outcome=outcome)


def beside(*records: Record) -> Measure | None:
    """The second chance after `records` and a slow candidate of another engine."""
    return second_chance(BOTH, [fitting(BOTH, SLOW, slower=4.0, trial="0000"), *records])


def test_a_larger_micro_batch_is_tried_where_a_smaller_one_lacked_next_to_nothing():
    decision = beside(ran_out(0.001))
    assert isinstance(decision, Measure)
    (larger,) = decision.candidates
    assert larger.engine == SMALL.engine
    assert larger.checkpointing == SMALL.checkpointing
    assert larger.micro_batch > SMALL.micro_batch


def test_it_is_not_where_the_smaller_one_lacked_more_than_fragments():
    assert beside(ran_out(0.05)) is None


def test_what_two_failures_rule_out_is_not_tried():
    first = beside(ran_out(0.001))
    assert first is not None
    second = beside(ran_out(0.001), ran_out(0.05, first.candidates[0], trial="0002"))
    assert second is None or second.candidates[0].micro_batch < first.candidates[0].micro_batch


def test_a_sweep_measures_what_a_narrow_failure_had_ruled_out():
    assert isinstance(
        exhaustive(BOTH, [*(fitting(BOTH, each, slower=4.0) for each in OTHERS), ran_out(0.001)]), Measure
    )
