"""The search: it finds what the sweep finds for less, it ends, and it says what is left to gain."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import bundled_workload, make_candidate, make_record
from helpers.searches import decide, fitting, make_space, play

from ladder.events.outcome import Outcome, Record
from ladder.search.auto import auto, is_worth_a_trial
from ladder.search.belief import believe, expected_gain
from ladder.search.decisions import Measure
from ladder.search.policy import STRATEGIES
from ladder.search.space import ranking
from ladder.units import GIB


def test_the_first_trial_is_of_few_candidates_of_an_engine_that_fits_in_ascending_memory():
    decision = decide(make_space(), ())
    assert decision.engine.rung.name in ("zero1", "zero2", "zero3")
    assert {candidate.engine for candidate in decision.candidates} == {decision.engine}
    for each in (decision, decide(make_space(micro_batches=(1, 2, 4, 8, 16, 32, 64)), ())):
        assert 1 <= len(each.candidates) <= 4
    order = [candidate.key for candidate in make_space().of_engine(decision.engine)]
    places = [order.index(candidate.key) for candidate in decision.candidates]
    assert places == sorted(places)
    assert "cpu" in decide(make_space(memory_limit=24 * GIB), ()).engine.rung.devices, "what cannot fit is not tried"


def test_the_search_ends_when_everything_fits_and_measures_a_fraction():
    space = make_space()
    assert auto(space, ()) == auto(make_space(), []), "the same history gives the same decision"
    records = play(space, "fits")
    assert 1 <= len(records) < len(space.candidates) / 4


def test_a_candidate_that_failed_is_never_asked_for_again_and_a_broken_engine_is_left_alone():
    space = make_space("zero2", "zero3")
    crashed = Outcome(kind="crash", moment="step", sentence="x")
    records: list[Record] = []
    while isinstance(decision := auto(space, records), Measure):
        failed = decision.candidates[0]
        assert failed.key not in {record.candidate_key for record in records}
        records.append(make_record(failed, "crash", trial=f"{len(records):04d}", outcome=crashed))
    assert len(records) == 4


def test_an_engine_that_ran_out_of_host_memory_rules_out_those_that_need_more():
    space = make_space("zero3", "zero2+opt-cpu", "zero3+param-cpu+opt-cpu")
    lean = next(candidate for candidate in space.candidates if candidate.engine.rung.name == "zero2+opt-cpu")
    outcome = Outcome(kind="host_oom", moment="engine", sentence="the kernel killed rank 0")
    before, after = (believe(space, known) for known in ((), [make_record(lean, "host_oom", outcome=outcome)]))
    for candidate in space.candidates:
        if before.outlook(candidate).host >= before.outlook(lean).host:
            assert before.outlook(candidate).fits > after.outlook(candidate).fits == 0
        else:
            assert after.outlook(candidate).fits == before.outlook(candidate).fits


def test_a_wider_tolerance_ends_the_search_earlier():
    def trials(tolerance: float) -> int:
        return len({record.trial for record in play(make_space(tolerance=tolerance), "fits")})

    assert trials(0.5) < trials(0.001)


@pytest.mark.parametrize(
    ("behind", "deviation", "fits", "step_seconds", "worth_it"),
    [
        (0.0, 0.05, 1.0, 0.1, True),
        (0.1, 0.1, 1.0, 0.1, True),
        (0.2, 0.1, 1.0, 0.1, False),
        (0.0, 0.05, 0.1, 0.1, False),
        (0.1, 0.1, 1.0, 60.0, False),  # its trial takes longer than the gain saves in an hour of training
        (0.0, 0.1, 1.0, 60.0, True),  # but a gain above the tolerance is worth any trial
    ],
)
def test_a_trial_takes_a_chance_of_more_than_the_tolerance_and_a_gain_that_is_worth_its_seconds(
    behind: float, deviation: float, fits: float, step_seconds: float, worth_it: bool
):
    speed = 100.0 * (1 - behind)
    outlook: Any = SimpleNamespace(
        candidate=make_candidate("zero2", micro_batch=1),
        workload=bundled_workload("llama-2-7b"),
        belief=SimpleNamespace(space=make_space("zero2")),
        shallow=False,
        speed=SimpleNamespace(
            tokens_per_second=speed, accumulate_seconds=step_seconds, step_seconds=lambda accumulation: step_seconds
        ),
        deviation=deviation,
        fits=fits,
        optimistic=speed * math.exp(1.28 * deviation),
        gain_over=lambda over: fits * expected_gain(speed, deviation, over=over),
    )
    assert is_worth_a_trial(outlook, 100.0, 0.02) is worth_it


def test_once_something_fits_a_trials_first_candidate_decides_about_the_others():
    space = make_space()
    first = decide(space, ())
    assert first.first_within == {}  # there is nothing to compare with
    records = [fitting(space, candidate) for candidate in first.candidates]
    later = decide(space, records)
    best = max(record.tokens_per_second or 0.0 for record in records)
    step = space.workload.global_batch_size * space.workload.seq_len / best
    assert set(later.first_within) == {candidate.key for candidate in later.candidates[1:]}
    assert all(seconds > step / 2 for seconds in later.first_within.values())


def test_the_first_trial_has_no_candidate_that_would_only_decide_about_the_others():
    """They all run, as there is nothing yet that they have to beat."""
    space = make_space(memory_limit=62 * GIB)
    decision = decide(space, ())
    slowest, *others = sorted(
        (believe(space, ()).outlook(each) for each in decision.candidates), key=lambda each: each.tokens_per_second
    )
    assert not decision.first_within
    assert len(others) == 2
    assert slowest.optimistic > max(each.tokens_per_second for each in others if each.fits > 0.9)


@pytest.mark.parametrize("doubtful", [{"num_steps": 1}, {"alloc_retries": 2}])
def test_a_single_step_or_one_that_thrashed_teaches_less_about_the_other_candidates(doubtful: dict[str, Any]):
    space = make_space("zero2", "zero3")
    tried, other = (next(each for each in space.candidates if each.micro_batch == size) for size in (2, 4))
    known, doubted = fitting(space, tried), fitting(space, tried, **doubtful)
    prior, sure, unsure = (believe(space, records).outlook(other) for records in ((), (known,), (doubted,)))
    assert sure.deviation < unsure.deviation < prior.deviation


@pytest.mark.parametrize("strategy", ["auto", "exhaustive"])
def test_what_does_not_accumulate_is_not_measured_in_an_engine_that_does(strategy: str):
    space = make_space("zero1", "zero2", "zero3", "zero2+opt-cpu", memory_limit=64 * GIB)
    mixed, records = set(), list[Record]()
    for number in range(1, 40):
        decision = STRATEGIES[strategy](space, records)
        if not isinstance(decision, Measure):
            break
        if len({candidate.accumulation > 1 for candidate in decision.candidates}) > 1:
            mixed.add(decision.engine.key)
        records += [fitting(space, candidate, trial=f"{number:04d}") for candidate in decision.candidates]
    assert any(record.candidate_key.endswith("mb=16") for record in records)
    assert mixed <= {"zero3"}


def test_where_nothing_is_believed_to_fit_a_few_engines_show_that_it_is_so():
    space = make_space(memory_limit=2 * GIB)
    assert not any(believe(space, ()).outlook(candidate).fits > 0.03 for candidate in space.candidates)
    records = play(space, "oom")
    engines = {space.by_key[record.candidate_key].engine for record in records}
    assert not ranking(records)
    assert 2 <= len(engines) < len(space.engines) / 2
    assert len(records) == len(engines), "one candidate of each is enough"


@pytest.mark.parametrize("gib", [32, 40, 64, 80])
def test_a_trial_of_an_engine_with_a_candidate_that_surely_fits_has_such_a_one(gib: int):
    space = make_space(memory_limit=gib * GIB)
    decision = decide(space, ())
    own, asked = (
        max(believe(space, ()).outlook(candidate).fits for candidate in candidates)
        for candidates in (space.of_engine(decision.engine), decision.candidates)
    )
    assert asked >= min(own, 0.9)


def test_a_host_with_a_third_too_little_memory_is_believed_to_be_too_small():
    space = make_space("zero3+param-cpu+opt-cpu")
    candidate = space.candidates[0]
    enough = believe(space, ()).outlook(candidate).host
    small = replace(space, host_memory=int(enough * 2 / 3))
    assert believe(small, ()).outlook(candidate).fits < 0.03
    ample = replace(space, host_memory=int(enough * 3 / 2))
    assert believe(ample, ()).outlook(candidate).fits > 0.97
