"""The stream of events that a tune tells: what comes in which order, and what a callback that fails can do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from helpers.tunes import on_paper

import ladder


def tune(folder: Path, *callbacks: Any) -> ladder.Tuned:
    return on_paper(folder, "opt-1.3b", rungs=["zero2"], callbacks=callbacks)


def test_a_callback_is_told_everything_in_the_order_in_which_it_happens(tmp_path: Path) -> None:
    told: list[ladder.TuneEvent] = []
    tuned = tune(tmp_path, told.append)
    assert ladder.tune.__doc__ is not None
    for kind in {type(event) for event in told}:
        assert f"`ladder.{kind.__name__}`" in ladder.tune.__doc__
        assert getattr(ladder, kind.__name__) is kind
    kinds = [type(event) for event in told if not isinstance(event, ladder.Note)]
    assert kinds[0] is ladder.SearchBegins
    assert kinds[-1] is ladder.TuneEnds
    trials = [kind for kind in kinds[1:-1] if kind is not ladder.RankReported]
    assert trials == [ladder.TrialBegins, ladder.TrialEnds] * (len(trials) // 2)
    assert told[-1] == ladder.TuneEnds(tuned.best, tuned.output.result.stopped, interrupted=False)


def test_what_a_trial_says_is_kept_before_a_callback_hears_of_it(tmp_path: Path) -> None:
    def interrupt(event: ladder.TuneEvent) -> None:
        if isinstance(event, ladder.TrialEnds):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, interrupt)
    told: list[ladder.TuneEvent] = []
    tune(tmp_path, told.append)
    assert next(event for event in told if isinstance(event, ladder.SearchBegins)).records


def test_a_callback_that_fails_is_logged_and_called_no_more_and_the_tune_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[ladder.TuneEvent] = []
    others: list[ladder.TuneEvent] = []

    def stumble(event: ladder.TuneEvent) -> None:
        calls.append(event)
        if isinstance(event, ladder.TrialBegins):
            raise ZeroDivisionError("in somebody's plot")

    with caplog.at_level(logging.ERROR, logger="ladder"):
        tuned = tune(tmp_path, stumble, others.append)
    assert tuned.best.candidate.engine.rung.name == "zero2"
    assert isinstance(calls[-1], ladder.TrialBegins)
    assert isinstance(others[-1], ladder.TuneEnds)
    (logged,) = caplog.records
    assert "stumble failed and will not be called again; the tune continues." in logged.message
    assert "in somebody's plot" in caplog.text
