"""What counts as silence of a rank: time in which it could have been heard, and no pause of the whole trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import bundled_workload, tiny_trial

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.events.as_json import to_json
from ladder.events.protocol import Event, PhaseEvent, StepEvent
from ladder.launch import local, watch
from ladder.launch.base import Deadlines
from ladder.launch.watch import Watch
from ladder.tuning.trial_request import trial_deadlines

TURN = 0.02
HOUR = 3600.0


class Clock:
    """The monotonic clock, which runs on while we are paused."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (watch, local):
        monkeypatch.setattr(module, "now", clock)
    return clock


def watching(folder: Path, clock: Clock, deadlines: Deadlines, *events: Event) -> Watch:
    """Of a trial on two ranks, each of which has told these events."""
    for rank in range(2):
        (folder / f"rank{rank}.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
    begun = Watch(tiny_trial(folder, 1), deadlines, lambda rank, event: None, clock())
    begun.read()
    return begun


@pytest.fixture
def begun(tmp_path: Path, clock: Clock) -> Watch:
    """The ranks have said that they build the model."""
    return watching(tmp_path, clock, Deadlines(model=50.0, total=HOUR / 2), PhaseEvent(t=clock(), phase="model"))


def silent_for(seconds: float, begun: Watch, clock: Clock, turn: float = TURN) -> bool:
    """Whether a rank is overdue after so many seconds of watching."""
    for _ in range(int(seconds / turn)):
        clock.seconds += turn
        begun.read()
    return begun.overdue() is not None


def test_a_pause_of_the_controller_and_its_ranks_together_is_no_silence_and_ends_none(
    begun: Watch, clock: Clock
) -> None:
    assert not silent_for(30, begun, clock)
    clock.seconds += HOUR
    assert not silent_for(15, begun, clock)
    assert silent_for(10, begun, clock)


@pytest.mark.parametrize(("rung", "is_silence"), [("zero3+opt-nvme", False), ("zero3+opt-cpu", True)])
def test_a_step_that_moves_states_to_a_drive_may_take_long_after_short_ones_that_do_not(
    tmp_path: Path, clock: Clock, rung: str, is_silence: bool
) -> None:
    events = (PhaseEvent(t=clock(), phase="warmup"), StepEvent(t=clock(), candidate="any", seconds=1.0))
    deadlines = trial_deadlines(bundled_workload("llama-2-7b"), Engine(RUNGS_BY_NAME[rung]))
    begun = watching(tmp_path, clock, deadlines, *events)
    assert silent_for(600, begun, clock, turn=1.0) == is_silence


def test_a_controller_that_is_slow_at_every_turn_still_finds_a_silent_rank(begun: Watch, clock: Clock) -> None:
    assert silent_for(200, begun, clock, turn=2.0)
