"""How long a tune is said to take: a search on paper whose truth is the prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from helpers.searches import make_space, space_of

from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.candidates import Engine
from ladder.events.outcome import Record
from ladder.search.auto import auto
from ladder.search.decisions import Measure, Stop
from ladder.search.policy import exhaustive
from ladder.search.rehearsal import Price, in_words, price
from ladder.search.space import Space

SMALL = make_space("zero2", "zero3", micro_batches=(1, 2))


def test_the_price_is_the_same_each_time_and_counts_trials_proof_and_comparisons() -> None:
    plain, compared = price(SMALL, auto), price(SMALL, auto, comparisons=2)
    assert plain == price(SMALL, auto)
    assert plain is not None
    assert compared is not None
    assert plain.trials >= 1
    assert compared.seconds > plain.seconds + 5.0


def test_trying_everything_costs_more_than_what_can_change_the_answer() -> None:
    space = make_space("zero1", "zero2", "zero3", "zero2+opt-cpu")
    cheap, dear = price(space, auto), price(space, exhaustive)
    assert cheap is not None
    assert dear is not None
    assert dear.seconds > 1.5 * cheap.seconds


def test_each_trial_is_paid_for() -> None:
    def stops_after(number: int):
        def strategy(space: Space, records: Sequence[Record]) -> Measure | Stop:
            done = len({record.trial for record in records if record.purpose == "measure"})
            left = space.candidates[done]
            return Stop("enough") if done == number else Measure(left.engine, (left,), "the next one")

        return strategy

    prices = [price(SMALL, stops_after(number)) for number in (1, 2, 4)]
    assert [each.trials for each in prices if each] == [1, 2, 4]
    seconds = [each.seconds for each in prices if each]
    assert seconds == sorted(set(seconds))


def test_where_nothing_fits_there_is_no_price() -> None:
    assert price(replace(SMALL, memory_limit=1 << 30), auto) is None
    assert price(replace(SMALL, host_memory=1 << 20), auto) is None


def test_rungs_without_deepspeed_are_searched_after_the_others_and_cost_more() -> None:
    own = space_of()
    both = space_of(*own.engines, *map(Engine, PLAIN_RUNGS))
    first, whole = price(own, auto), price(both, auto)
    assert first is not None
    assert whole is not None
    assert whole.seconds > first.seconds


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.0, "5 seconds"), (43.0, "45 seconds"), (89.0, "90 seconds"), (100.0, "2 minutes")]
)
def test_a_duration_is_said_as_coarsely_as_it_is_known(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_the_price_in_words() -> None:
    assert Price(250.0, 5).sentence() == "about 4 minutes: 5 trials and the proof"
    assert Price(40.0, 1).sentence() == "about 40 seconds: 1 trial and the proof"
