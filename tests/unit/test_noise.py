"""What a tune on a busy machine says: that it was, ranges in place of figures, and what it cannot tell apart."""

from __future__ import annotations

from dataclasses import replace

from helpers import make_candidate, make_measurement, make_record
from helpers.searches import make_space

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.report.noise import busy_sentence, ends, not_told_apart

SPACE = make_space("zero1", "zero2", "zero3")
ONE, OTHER, SLOW = (make_candidate(name) for name in ("zero1", "zero2", "zero3"))


def seen(candidate: Candidate, speed: float, others: float | None, **changes: object) -> Record:
    measurement = make_measurement(others=others, **changes)
    return replace(make_record(candidate, tokens_per_second=speed), measurement=measurement)


def test_a_busy_machine_is_said_with_what_others_took_and_an_idle_one_is_not() -> None:
    assert busy_sentence([seen(ONE, 100.0, 0.05), seen(OTHER, 90.0, None)]) == ""
    assert busy_sentence([seen(ONE, 100.0, 0.2), seen(OTHER, 90.0, 0.5), seen(SLOW, 80.0, 0.0)]).startswith(
        "This machine was busy: in 2 of 3 measurements, other programs took 20% to 50% of the ranks' cores."
    )
    on_gpu = seen(OTHER, 90.0, None, others_on_gpu=0.4)
    assert "took 40% of a GPU's time. " in busy_sentence([on_gpu])
    assert "took 20% to 40% of a GPU's time and the ranks' cores. " in busy_sentence([seen(ONE, 100.0, 0.2), on_gpu])


def test_a_speed_stands_for_its_windows_its_trial_and_what_an_idle_machine_would_reach() -> None:
    assert ends(seen(ONE, 100.0, 0.0)) == (100.0, 100.0)
    assert ends(seen(ONE, 100.0, 0.0, window_speeds=(0.9, 1.05)), seen(ONE, 80.0, 0.0)) == (80.0, 105.0)
    assert ends(seen(ONE, 100.0, 0.5)) == (100.0, 200.0)


def test_engines_that_the_busy_machine_may_have_slowed_more_than_the_answer_are_named() -> None:
    best, idle = seen(ONE, 100.0, 0.1), seen(OTHER, 90.0, 0.0)
    trials = [replace(best, purpose="measure"), seen(OTHER, 90.0, 0.3), seen(SLOW, 50.0, 0.3)]
    assert not_told_apart(SPACE, trials, best) == "On this busy machine, zero1 cannot be told apart from zero2."
    assert not_told_apart(SPACE, [replace(best, purpose="measure"), idle], best) == ""
