"""What a time budget allows: no trial begins that cannot end in time together with its proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers import make_record
from helpers.searches import fitting, make_space

from ladder.events.outcome import Record
from ladder.search.auto import auto
from ladder.search.belief import believe
from ladder.search.cost import comparison_seconds, expected_seconds, proof_seconds
from ladder.search.decisions import Measure, Stop
from ladder.search.policy import exhaustive
from ladder.search.space import Space
from ladder.search.time_left import TimeLeft, within

SPACE = make_space()
FIRST = SPACE.by_key["zero3 ckpt=on mb=4"]
OTHER = SPACE.by_key["zero2+opt-cpu ckpt=on mb=4"]


def trial_of(space: Space, *keys: str, **changes: bool) -> Measure:
    candidates = tuple(space.by_key[key] for key in keys)
    return Measure(candidates[0].engine, candidates, "a test", **changes)  # type: ignore[arg-type]


def price(space: Space, records: Sequence[Record], left: TimeLeft, decision: Measure, number: int) -> float:
    """Seconds that a trial of the first `number` candidates and its proof have to have."""
    belief = believe(space, records)
    pace = left.reserve(belief, records, decision.candidates[:1]) / (
        proof_seconds(belief.outlook(decision.candidates[0]))[0]
        + left.comparisons * comparison_seconds(belief.outlook(decision.candidates[0]))
    )
    trial = expected_seconds([belief.outlook(each) for each in decision.candidates[:number]])
    return pace * trial + left.reserve(belief, records, decision.candidates[:number])


@pytest.mark.parametrize("comparisons", [0, 2])
@pytest.mark.parametrize("number", [1, 2])
def test_a_trial_gets_as_many_candidates_as_end_in_time_with_their_proof(number: int, comparisons: int) -> None:
    belief, left = believe(SPACE, ()), TimeLeft(seconds=0, comparisons=comparisons)
    slow, fast = (SPACE.by_key[f"zero2+opt-cpu ckpt=on mb={micro_batch}"] for micro_batch in (4, 8))
    decision = trial_of(SPACE, slow.key, fast.key)
    chosen = (fast,) if number == 1 else (slow, fast)
    enough = price(SPACE, (), left, replace(decision, candidates=chosen), number)
    allowed = replace(left, seconds=enough + 0.01).allows(belief, (), decision)
    assert allowed is not None
    assert allowed.candidates == chosen
    less = replace(left, seconds=enough - 0.01).allows(belief, (), decision)
    assert (less.candidates if less else ()) == ((fast,) if number == 2 else ())


def test_the_proof_of_the_best_so_far_is_kept_time_for_until_it_is_proven() -> None:
    record = fitting(SPACE, OTHER)
    records = [record]
    belief, left = believe(SPACE, records), TimeLeft(seconds=100)
    assert left.reserve(belief, records) >= proof_seconds(belief.outlook(OTHER))[0]
    assert left.reserve(belief, [*records, replace(record, purpose="proof")]) == 0.0


def test_a_machine_that_took_twice_as_long_is_expected_to_do_so_again() -> None:
    records = [fitting(SPACE, FIRST)]
    belief = believe(SPACE, records)
    expected = expected_seconds([belief.outlook(FIRST)])
    slow = TimeLeft(seconds=100, taken={"0001": {"engine": 2 * expected}})
    assert 1.4 < slow.pace(belief, records) < 2.0
    assert TimeLeft(seconds=100).pace(belief, records) == 1.0
    failed = [make_record(FIRST, "gpu_oom", trial="0001")]
    assert slow.pace(believe(SPACE, failed), failed) == 1.0, "what measured nothing does not count"
    ratio = slow.reserve(belief, records) / TimeLeft(seconds=100).reserve(belief, records)
    assert ratio == pytest.approx(slow.pace(belief, records))


def test_without_time_for_the_best_offer_the_best_that_ends_in_time_is_tried() -> None:
    slow = make_space("zero2+opt-cpu", "zero3+param-cpu+opt-cpu", "zero3")
    enough = price(slow, (), TimeLeft(seconds=0), trial_of(slow, FIRST.key), 1)
    decision = within(auto, slow, (), TimeLeft(seconds=enough * 1.05))
    assert isinstance(decision, Measure)
    assert decision.engine.key == "zero3"


@pytest.mark.parametrize("strategy", [auto, exhaustive])
def test_the_end_for_want_of_time_names_what_was_left_untried_and_how_much_faster_it_might_be(strategy) -> None:
    records = [fitting(SPACE, OTHER)]
    decision = within(strategy, SPACE, records, TimeLeft(seconds=1.0))
    assert isinstance(decision, Stop)
    assert decision.late
    assert "no time is left to try zero" in decision.reason
    assert "above the fastest trial, a trial of" in decision.reason
    assert "more engines" in decision.reason


def test_with_time_for_everything_the_search_decides_as_without_a_budget() -> None:
    records = [fitting(SPACE, FIRST)]
    for seen in ([], records):
        assert within(auto, SPACE, seen, TimeLeft(seconds=1e6)) == auto(SPACE, seen)
    everything = [fitting(SPACE, each) for each in SPACE.candidates]
    done = within(auto, SPACE, everything, TimeLeft(seconds=1.0))
    assert isinstance(done, Stop)
    assert not done.late
