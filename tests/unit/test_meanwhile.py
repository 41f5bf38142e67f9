"""What reports need is predicted while a proof's ranks start."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_trial

from ladder.tuning.tune_events import TrialBegins, TuneEvent, meanwhile


def begins(folder: Path, *, proof: bool) -> TrialBegins:
    return TrialBegins(replace(tiny_trial(folder, 1), proof=proof), "to be seen")


def joined() -> None:
    for thread in threading.enumerate():
        if thread.name == "meanwhile":
            thread.join()


def test_the_work_begins_on_another_thread_with_a_proof_and_with_no_other_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, worked_on = list[TuneEvent](), list[threading.Thread]()
    tell = meanwhile(told.append, lambda: worked_on.append(threading.current_thread()))
    events = [begins(tmp_path, proof=False), begins(tmp_path, proof=True)]
    tell(events[0])
    joined()
    assert worked_on == []
    tell(events[1])
    joined()
    assert len(worked_on) == 1
    assert worked_on[0] is not threading.current_thread()
    assert told == events
    seen = list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", seen.append)
    meanwhile(lambda event: None, lambda: 1 / 0)(events[1])
    joined()
    assert seen == [], "an error of the work ends only its thread"
