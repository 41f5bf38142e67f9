"""The wall clock may jump by a day, forth and back: no deadline and no measured time depends on it."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from faults.hard_tune import HardTune, hard_tune, jumping_clock
from helpers import tiny_trial

from ladder.emit import load_best_config
from ladder.events.protocol import PhaseEvent
from ladder.launch import watch as watch_module
from ladder.launch.base import Deadlines
from ladder.launch.watch import Watch, now

pytestmark = pytest.mark.timeout(300)
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to make the clock jump")
DAY = 86400.0


@pytest.fixture(scope="module")
def tuned() -> HardTune:
    return hard_tune()


@needs_gcc
def test_the_clock_really_jumps_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    code = "import time\nfor _ in range(25): print(time.time(), time.monotonic()); time.sleep(0.1)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=jumping_clock(tmp_path),
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    readings = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    walls, steady = zip(*readings, strict=True)
    jumps = [after - before for before, after in pairwise(walls)]
    assert max(jumps) > DAY
    assert min(jumps) < -DAY
    assert all(0.09 < after - before < 5 for before, after in pairwise(steady))


@needs_gcc
def test_a_tune_under_a_jumping_clock_finds_its_answer_with_sane_times(tuned: HardTune) -> None:
    assert tuned.status == 0, tuned.said
    stamps = [
        datetime.datetime.fromisoformat(line["datetime_complete"])
        for line in map(json.loads, (tuned.run / "journal.log").read_text().splitlines())
        if line.get("datetime_complete")
    ]
    assert stamps
    real = datetime.datetime.now(datetime.timezone.utc)
    assert all(abs((stamp - real).total_seconds()) > DAY / 2 for stamp in stamps), "the clock of the tune did not jump"
    assert 0 < load_best_config(tuned.output)["ladder"]["step_seconds"] < 60
    for trial in (tuned.run / "trials").iterdir():
        times = [json.loads(line)["t"] for line in (trial / "rank0.jsonl").read_text().splitlines()]
        assert 0 < max(times) - min(times) < 300


def test_a_deadline_passes_by_the_monotonic_clock_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_trial(tmp_path, 1)
    for rank in range(2):
        event = PhaseEvent(t=now(), phase="model")
        (tmp_path / f"rank{rank}.jsonl").write_text(event.model_dump_json() + "\n")
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
    assert found == {"report/about.py", "machine/known_machine.py", "tuning/earlier_steps.py"}
