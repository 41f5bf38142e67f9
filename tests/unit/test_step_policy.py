"""For how many optimizer steps a candidate is timed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ladder.events.step_policy import CandidateSpec, StepPolicy

POLICY = StepPolicy()
"""As tunes have it: nobody chooses these figures."""
LONG, SHORT, BEST = 10.0, 1.0, 2.0
CANDIDATE = CandidateSpec(key="a", checkpoint_every=0, micro_batch=1, accumulation=4)
LOSER = replace(CANDIDATE, beat_step_seconds=BEST)


@pytest.mark.parametrize(
    ("steps", "before", "elapsed", "known"),
    [
        ([3.0], 3.0, LONG, True),
        ([3.0], 3.0, SHORT, False),
        ([3.0], 3.2, LONG, False),
        ([3.0], math.inf, LONG, False),
        ([3.0, 3.0], math.inf, SHORT, True),
        ([3.0, 3.1], math.inf, LONG, True),
        ([3.0, 3.2], math.inf, SHORT, False),
        ([3.0, 3.2], 3.0, LONG, False),
        ([3.0, 3.2, 3.0], 3.0, LONG, True),
    ],
)
def test_timing_ends_when_steps_agree_and_time_is_short_or_their_median_is_known(
    steps: list[float], before: float, elapsed: float, known: bool
) -> None:
    assert POLICY.is_enough(CANDIDATE, steps, before, elapsed, elapsed) == known


@pytest.mark.parametrize(
    ("sustained", "accumulation", "seconds", "micro_steps"),
    [
        (0.0, 64, 0.13, 2),
        (1.0, 64, 0.13, 9),
        (1.0, 4, 0.13, 4),
        (1.0, 64, 3.0, 2),
        (1.0, 64, None, 2),
        (1.0, 1, None, 2),
    ],
    ids=["not asked for", "until a second is over", "no more than in training", "one is enough", "none before", "one"],
)
def test_a_timed_step_accumulates_for_as_long_as_is_asked_but_no_more_than_a_training_s(
    sustained: float, accumulation: int, seconds: float | None, micro_steps: int
) -> None:
    candidate = replace(CANDIDATE, accumulation=accumulation)
    assert StepPolicy(sustained_seconds=sustained).micro_steps(candidate, 2, seconds) == micro_steps


def test_one_step_is_enough_of_what_loses_once_it_was_timed_for_long_enough() -> None:
    assert POLICY.is_enough(LOSER, [3.0], math.inf, 0.6, 0.6)
    assert not POLICY.is_enough(LOSER, [3.0], math.inf, 0.4, 0.6)
    assert not POLICY.is_enough(LOSER, [2.1], math.inf, 0.6, 0.6)  # too close to the best to be left so early
    assert not POLICY.is_enough(CANDIDATE, [3.0], math.inf, 0.6, 0.6)


def test_what_loses_is_timed_until_its_steps_no_longer_get_much_shorter() -> None:
    assert not POLICY.is_enough(LOSER, [5.0], 10.0, 3.0, SHORT)
    assert not POLICY.is_enough(LOSER, [5.0, 4.0], 10.0, 3.0, SHORT)
    assert POLICY.is_enough(LOSER, [5.0, 4.9], 10.0, 3.0, SHORT)
    assert POLICY.is_enough(LOSER, [5.0], 10.0, 3.0, LONG)  # a long time was spent on it


def test_no_fewer_steps_are_timed_than_the_minimum_and_no_more_than_the_maximum() -> None:
    five, unsteady = replace(POLICY, minimum=5), [1.0, 2.0] * 6
    assert not five.is_enough(CANDIDATE, [3.0] * 4, 3.0, 1000.0, 1000.0)
    assert five.is_enough(CANDIDATE, [3.0] * 5, 3.0, 1000.0, 1000.0)
    assert POLICY.is_enough(CANDIDATE, unsteady, 1.0, SHORT, SHORT)
    assert not POLICY.is_enough(CANDIDATE, unsteady[:-1], 1.0, SHORT, SHORT)


@pytest.mark.parametrize(("slower", "hopeless"), [(2.0, False), (3.5, False), (5.0, True)])
def test_a_first_step_condemns_a_candidate_only_if_it_is_many_times_as_slow(slower: float, hopeless: bool) -> None:
    assert LOSER.loses(slower * BEST, StepPolicy().hopeless_margin) is hopeless
