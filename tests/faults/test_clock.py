"""The wall clock may jump by a day, forth and back: no deadline and no measured time depends on it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers import tiny_trial

from ladder.events.as_json import to_json
from ladder.events.protocol import PhaseEvent
from ladder.launch import watch as watch_module
from ladder.launch.base import Deadlines
from ladder.launch.watch import Watch, now

pytestmark = pytest.mark.timeout(300)
DAY = 86400.0


def test_a_deadline_passes_by_the_monotonic_clock_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_trial(tmp_path, 1)
    for rank in range(2):
        event = PhaseEvent(t=now(), phase="model")
        (tmp_path / f"rank{rank}.jsonl").write_text(to_json(event) + "\n")
    began = now()
    watch = Watch(spec, Deadlines(model=50.0), lambda rank, event: None, began)
    watch.read()
    for jump in (DAY, -DAY):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1e9 + jump)
        assert watch.overdue() is None
    monkeypatch.undo()
    monkeypatch.setattr(watch_module, "now", lambda: began + 51.0)
    stop = watch.overdue()
    assert stop is not None
    assert stop.kind == "hang"


def test_only_dates_that_are_kept_are_read_from_the_wall_clock() -> None:
    package = Path(watch_module.__file__).parents[1]
    readers = ("time.time(", "datetime.now(", "datetime.utcnow(", "CLOCK_REALTIME")
    files = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    found = {name for name, text in files.items() if any(word in text for word in readers)}
    # The date of a tune, for its reader, and the age of what was measured of a machine and of earlier steps, in days.
    assert found == {"report/about.py", "machine/known_machine.py", "tuning/known.py"}
