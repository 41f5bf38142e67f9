"""The space: what a failure says about other candidates, and the order in which they are tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_candidate, make_record, there
from helpers.scripts import make_script, script_workload
from helpers.searches import fitting, make_space, out_of_memory
from helpers.values import make_measurement

from ladder.events.outcome import Outcome, Record
from ladder.search.decisions import Measure, Prove, Stop
from ladder.search.ledger import ledger
from ladder.search.policy import exhaustive, proof
from ladder.search.remedies import remedies
from ladder.search.second_chance import second_chance
from ladder.search.space import PARITY, disproved, proven, ruled_out
from ladder.techniques.liger import LIGER
from ladder.tuning.reach import less_disproved
from ladder.units import GIB

SMALL = make_candidate("zero2", micro_batch=2, accumulation=8)
LARGE = make_candidate("zero2", micro_batch=4, accumulation=4)
WHOLE = make_candidate("zero2", checkpointing=False, micro_batch=2, accumulation=8)
OTHER = make_candidate("zero3", micro_batch=4, accumulation=4)


def test_running_out_of_memory_rules_out_what_needs_at_least_as_much():
    space, records = make_space("zero2", "zero3"), [out_of_memory(SMALL)]
    assert ruled_out(LARGE, space, records) is not None
    assert ruled_out(WHOLE, space, records) is not None
    assert ruled_out(make_candidate("zero2", micro_batch=1, accumulation=16), space, records) is None
    assert ruled_out(OTHER, space, records) is None
    assert ruled_out(LARGE, space, [out_of_memory(WHOLE)]) is None, "it was without checkpointing"


def test_running_out_while_gradients_accumulate_says_nothing_about_what_does_not_accumulate():
    space = make_space("zero1", "zero3")
    for rung, speaks in (("zero1", False), ("zero3", True)):  # stage 3 has room for its gradients in any case
        accumulating = make_candidate(rung, micro_batch=8, accumulation=2)
        whole = make_candidate(rung, micro_batch=16, accumulation=1)
        assert (ruled_out(whole, space, [out_of_memory(accumulating)]) is not None) is speaks


def test_what_ran_out_late_and_in_pieces_speaks_for_nobody_and_alone_it_does():
    space, fits = make_space("zero2"), make_record(make_candidate("zero2", micro_batch=1, accumulation=16))
    late, alone = (make_record(SMALL, "gpu_oom", trial=trial, outcome=IN_PIECES) for trial in (fits.trial, "0002"))
    assert ruled_out(LARGE, space, [fits, late]) is None
    assert ruled_out(LARGE, space, [fits, alone]) is not None
    assert ruled_out(LARGE, space, [fits, late, alone]) is not None
    assert ruled_out(LARGE, space, [fits, replace(late, outcome=replace(IN_PIECES, bytes_free=GIB))]) is not None


def test_an_engine_that_did_not_start_rules_out_all_its_candidates():
    failed = make_record(LARGE, "crash", outcome=Outcome(kind="crash", moment="engine", sentence="no"))
    assert ruled_out(SMALL, make_space("zero2"), [failed]) is not None


def test_an_engine_that_crashed_twice_and_never_fitted_is_taken_for_broken():
    space = make_space("zero2")
    crashes = [
        make_record(candidate, "crash", outcome=Outcome(kind="crash", moment="step", sentence="no"))
        for candidate in (SMALL, LARGE)
    ]
    assert ruled_out(WHOLE, space, crashes[:1]) is None
    assert ruled_out(WHOLE, space, crashes) is not None
    fitting = make_record(make_candidate("zero2", micro_batch=1, accumulation=16))
    assert ruled_out(WHOLE, space, [*crashes, fitting]) is None
    other_losses = [replace(each, outcome=replace(each.outcome, moment=PARITY)) for each in crashes]
    assert ruled_out(WHOLE, space, [replace(each, purpose="proof") for each in other_losses]) is None


def test_the_last_proof_of_a_candidate_decides():
    passed = make_record(SMALL, purpose="proof")
    failed = make_record(SMALL, "crash", purpose="proof", outcome=Outcome(kind="crash", moment="gather", sentence="no"))
    assert (list(proven([passed, failed])), list(disproved([passed, failed]))) == ([], [SMALL.key])
    assert (list(proven([failed, passed])), list(disproved([failed, passed]))) == ([SMALL.key], [])


def test_what_filled_the_memory_in_its_trial_is_proven_only_if_it_was_much_faster():
    space = make_space("zero2", "zero3")
    steady = make_record(SMALL, tokens_per_second=100.0)
    for speed, first in ((105.0, SMALL), (115.0, OTHER)):
        busy = make_record(OTHER, tokens_per_second=speed, measurement=make_measurement(alloc_retries=3))
        decision = proof(space, [busy, steady])
        assert isinstance(decision, Prove)
        assert decision.candidate.key == first.key
    proven_one = make_record(SMALL, tokens_per_second=99.0, purpose="proof", trial="0002")
    busy = make_record(OTHER, tokens_per_second=105.0, measurement=make_measurement(alloc_retries=3))
    records = [busy, steady, proven_one]
    assert isinstance(proof(space, records), Stop)
    why = {entry.candidate_key: entry.why for entry in ledger(space, records, {})}[OTHER.key]
    assert why.endswith("not proven itself, as the allocator emptied its cache in its trial")


@pytest.mark.parametrize(("share", "again"), [(0.79, True), (0.81, False)])
def test_a_model_s_proof_that_was_disturbed_is_made_once_more(share: float, *, again: bool) -> None:
    space = make_space("zero2", "zero3")
    slower = make_record(OTHER, tokens_per_second=50.0)
    disturbed = make_record(SMALL, tokens_per_second=100.0 * share, purpose="proof", trial="0002")
    records = [make_record(SMALL, tokens_per_second=100.0), slower, disturbed]
    decision = proof(space, records)
    assert isinstance(decision, Prove if again else Stop)
    if isinstance(decision, Prove):
        assert decision.candidate == SMALL
    assert isinstance(proof(space, [*records, replace(disturbed, trial="0003")]), Stop)
    of_script = replace(space, workload=script_workload(make_script()))
    assert isinstance(proof(of_script, records), Stop)


def test_liger_s_kernels_that_crashed_in_two_engines_and_never_fitted_are_taken_for_broken():
    space = make_space("zero1", "zero2", "zero3")
    space = replace(space, engines=(*space.engines, *(engine.having(LIGER) for engine in space.engines)))
    first, second, third, usual = (
        make_candidate(rung, micro_batch=2, accumulation=8) for rung in ("zero1", "zero2", "zero3", "zero3")
    )
    first, second, third = (replace(each, engine=each.engine.having(LIGER)) for each in (first, second, third))
    crashes = [
        make_record(each, "crash", outcome=Outcome(kind="crash", moment="model", sentence="no"))
        for each in (first, second)
    ]
    assert ruled_out(third, space, crashes[:1]) is None
    assert there(ruled_out(third, space, crashes)).reason == "Liger's kernels failed 2 times (crash)"
    assert ruled_out(usual, space, crashes) is None
    assert ruled_out(third, space, [*crashes, make_record(replace(first, micro_batch=1, accumulation=16))]) is None


def test_a_model_that_cannot_checkpoint_keeps_its_candidates_without_checkpointing():
    workload = make_space("zero2").workload
    without = replace(workload, model=replace(workload.model, checkpoints=False))
    space = make_space("zero2", workload=without, checkpointing=("1/2", "cpu"))
    assert {candidate.checkpointing for candidate in space.candidates} == {"off"}
    assert len(space.candidates) == len(space.micro_batches)
    tight = replace(space, memory_limit=GIB)
    needs, less = (remedies(each).gpu_memory or 0 for each in (tight, replace(tight, workload=workload)))
    assert needs > less > GIB


# What ran out of memory late in its trial, and in pieces, is tried again alone where it may be the answer.

SPACE = make_space("zero2")
SMALLEST = make_candidate("zero2", micro_batch=1, accumulation=16)
BOTH = make_space("zero2", "zero3")
SLOW = make_candidate("zero3", micro_batch=1, accumulation=16)
IN_PIECES = Outcome(kind="gpu_oom", moment="forward", sentence="no", bytes_asked=2 * GIB, bytes_free=3 * GIB)


def late(trial: str = "0001") -> Record:
    return make_record(LARGE, "gpu_oom", trial=trial, outcome=IN_PIECES)


def test_it_is_measured_again_alone_where_it_is_predicted_to_beat_the_best():
    decision = second_chance(SPACE, [fitting(SPACE, SMALLEST), late()])
    assert isinstance(decision, Measure)
    assert decision.candidates == (LARGE,)


def test_it_is_not_where_the_best_is_faster_and_what_becomes_of_it_alone_is_final():
    other = make_candidate("zero2", checkpointing=False, micro_batch=4, accumulation=4)
    before = [fitting(SPACE, SMALLEST), late()]
    assert second_chance(SPACE, [*before, fitting(SPACE, other, trial="0002")]) is None
    assert second_chance(SPACE, [*before, late("0002")]) is None
    disproof = replace(late("0003"), purpose="proof")
    assert second_chance(SPACE, less_disproved([*before, fitting(SPACE, LARGE, trial="0002"), disproof])) is None


def test_a_sweep_ends_with_second_chances():
    sizes = [candidate for candidate in SPACE.candidates if candidate not in (SMALLEST, LARGE)]
    slow = [fitting(SPACE, candidate, slower=50.0, trial="0002") for candidate in sizes]
    records = [fitting(SPACE, SMALLEST, slower=50.0), late(), *slow]
    decision = exhaustive(SPACE, records)
    assert isinstance(decision, Measure)
    assert decision.candidates == (LARGE,)
    assert isinstance(exhaustive(SPACE, [*records, late("0003")]), Stop)


def ran_out(share: float) -> Record:
    """The smallest candidate lacked this share of the limit."""
    lacked = int(share * SPACE.memory_limit)
    outcome = Outcome(kind="gpu_oom", moment="backward", sentence="no", bytes_asked=GIB + lacked, bytes_free=GIB)
    return make_record(SMALLEST, "gpu_oom", outcome=outcome)


def beside(record: Record) -> Measure | None:
    """The second chance after `record` and a slow candidate of another engine."""
    return second_chance(BOTH, [fitting(BOTH, SLOW, slower=4.0, trial="0000"), record])


def test_a_larger_micro_batch_is_tried_where_a_smaller_one_lacked_no_more_than_fragments():
    assert beside(ran_out(0.05)) is None
    decision = beside(ran_out(0.001))
    assert isinstance(decision, Measure)
    (larger,) = decision.candidates
    assert larger.engine == SMALLEST.engine
    assert larger.checkpointing == SMALLEST.checkpointing
    assert larger.micro_batch > SMALLEST.micro_batch
