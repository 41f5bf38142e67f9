"""The stream of events that a tune tells: what comes in which order, and what a callback that fails can do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import ladder

EVENTS = {"Note", "SearchBegins", "TrialBegins", "RankReported", "TrialEnds", "TuneEnds"}


def tune(folder: Path, *callbacks: Any, **options: Any) -> ladder.Tuned:
    paper: dict[str, Any] = {"launcher": "simulated", "machine": "a100-40", "quiet": True, "rungs": ["zero2"]}
    places = {"run_dir": folder / "run", "output": folder / "best_config.json"}
    return ladder.tune("llama-2-7b", callbacks=callbacks, **{**paper, **places, **options})


def test_a_callback_is_told_everything_in_the_order_in_which_it_happens(tmp_path: Path) -> None:
    told: list[ladder.TuneEvent] = []
    tuned = tune(tmp_path, told.append)
    assert {type(event).__name__ for event in told} == EVENTS
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


def test_every_kind_of_event_is_in_the_docstring_and_can_be_imported() -> None:
    assert ladder.tune.__doc__ is not None
    for name in EVENTS:
        assert f"`ladder.{name}`" in ladder.tune.__doc__
        assert getattr(ladder, name).__name__ == name
