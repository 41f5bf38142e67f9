"""What the documented recipe would have ended on: as measured, or else as predicted and said to be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import make_candidate, make_record, there
from helpers.searches import fitting, make_space, out_of_memory

from ladder.report.first_fit import compared, first_fit, times_as_fast
from ladder.units import GIB

OFFLOADED = make_candidate("zero2+opt-cpu", micro_batch=1, accumulation=16)
SPACE = make_space("zero0", "zero2", "zero2+opt-cpu", "zero3", memory_limit=40 * GIB)
BEST = make_record(make_candidate("zero3", micro_batch=4), tokens_per_second=20_000.0, purpose="proof", trial="0009")


def test_what_was_never_measured_is_predicted_and_said_to_be():
    found = there(first_fit(SPACE, ()))
    assert (found.candidate.key, found.trial) == (OFFLOADED.key, None)
    assert found.low < found.tokens_per_second < found.high
    sentence = there(compared(SPACE, (), BEST))
    assert sentence.startswith("About ")
    assert f"times as fast as the documented recipe's first fit ({OFFLOADED.key}: predicted " in sentence
    assert "the steps before it are predicted not to fit" in sentence


def test_what_was_measured_is_held_against_its_trial():
    record = replace(fitting(SPACE, OFFLOADED, trial="0007"), tokens_per_second=5_000.0)
    earlier = [step for step in SPACE.candidates if step.engine.key in ("zero0", "zero2") and step.micro_batch == 1]
    failed = [out_of_memory(step) for step in earlier]
    assert compared(SPACE, [*failed, record], BEST) == (
        "4.0 times as fast as the documented recipe's first fit "
        "(zero2+opt-cpu ckpt=on mb=1: 5,000 tokens/s in trial 0007)."
    )


def test_nothing_is_claimed_where_a_trial_was_so_far_off_that_predictions_say_little():
    tried = make_candidate("zero3", micro_batch=1, accumulation=16)
    assert compared(SPACE, [fitting(SPACE, tried)], BEST) is not None
    assert compared(SPACE, [fitting(SPACE, tried, slower=20)], BEST) is None


def test_the_first_step_that_fits_counts_and_not_a_faster_one_below_it():
    later = replace(fitting(SPACE, make_candidate("zero3", micro_batch=1, accumulation=16)), tokens_per_second=9e9)
    assert there(first_fit(SPACE, [later])).candidate.key == OFFLOADED.key
    found = there(first_fit(SPACE, [later, out_of_memory(OFFLOADED, "0002")]))
    assert (found.candidate.engine.key, found.trial) == ("zero3", "0001")


def test_an_answer_within_the_range_of_a_predicted_first_fit_is_not_said_to_be_slower_or_faster():
    found = there(first_fit(SPACE, ()))
    for speed in (1.01 * found.low, 0.9 * found.tokens_per_second, 0.99 * found.high):
        assert times_as_fast(found, replace(BEST, tokens_per_second=speed)).startswith("Perhaps as fast as")
    assert " slower " in times_as_fast(found, replace(BEST, tokens_per_second=0.9 * found.low))
    assert "About 2.0 times" in times_as_fast(found, replace(BEST, tokens_per_second=2.0 * found.tokens_per_second))


def test_the_recipe_may_end_on_the_answer_or_on_nothing():
    own = replace(fitting(SPACE, OFFLOADED), tokens_per_second=100.0)
    assert compared(SPACE, [own], replace(own, purpose="proof")) == (
        "The documented recipe ends on the same configuration."
    )
    assert compared(replace(SPACE, memory_limit=GIB), (), BEST) is None


@pytest.mark.parametrize(
    ("speed", "of_trial", "words"),
    [
        (20_100.0, None, "As fast as"),
        (21_000.0, None, "5% slower"),
        (16_000.0, None, "1.2 times"),
        (10_000.0, 15_000.0, "1.5 to 2.0 times"),  # a proof and its trial are the ends of what is known
        (10_000.0, 40_000.0, "2.0 to 4.0 times"),
        (19_000.0, 22_000.0, "1.1 to 1.2 times"),
        (20_500.0, 23_000.0, "As far as can be told here, as fast as"),
    ],
)
def test_the_headline_does_not_flatter(speed: float, of_trial: float | None, words: str):
    records = [replace(fitting(SPACE, OFFLOADED), tokens_per_second=speed)]
    if of_trial is not None:
        records.append(replace(BEST, purpose="measure", trial="0005", tokens_per_second=of_trial))
    assert (compared(SPACE, records, BEST) or "").startswith(words)
