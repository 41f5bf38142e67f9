"""Watching one trial: the ranks' files, their deadlines, and the moment at which it has to be ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from pydantic import ValidationError

from ladder.launch.base import Deadlines, Listener, Stop
from ladder.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, PhaseEvent, StepEvent, TrialSpec, parse_event

# After the first rank fails, its peers get this long to report a cause of their own; then they are killed.
_GRACE_SECONDS = 0.3


def now() -> float:
    """Seconds on the clock the ranks write."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class RankFile:
    """Reads what one rank appends; a line still being written waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []

    def read_new(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        new = [event for line in data[:end].splitlines() if (event := _parse(line)) is not None]
        self.events += new
        return new


def _parse(line: bytes) -> Event | None:
    try:
        return parse_event(line)
    except (ValidationError, json.JSONDecodeError):
        return None  # a rank that writes nonsense reports nothing; its missing `done` tells


class Watch:
    """The state of one trial as its files tell it."""

    def __init__(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener, started: float) -> None:
        self._deadlines, self._listener, self._started = deadlines, listener, started
        self.files = [RankFile(Path(spec.folder) / f"rank{rank}.jsonl") for rank in range(spec.world_size)]
        self._heard = [started] * spec.world_size
        self._slowest_step = 0.0
        self._failed_at: float | None = None

    def read(self) -> None:
        """Take in what the ranks have written since."""
        for rank, file in enumerate(self.files):
            for event in file.read_new():
                self._heard[rank] = now()
                if isinstance(event, StepEvent):
                    self._slowest_step = max(self._slowest_step, event.seconds)
                if isinstance(event, FailedEvent) and self._failed_at is None:
                    self._failed_at = now()
                self._listener(rank, event)

    def note_exit(self, rank: int) -> None:
        """A rank is gone. Without a complete report that is a failure, whatever its exit status."""
        self.read()
        if not self.is_done(rank) and self._failed_at is None:
            self._failed_at = now()

    def is_done(self, rank: int) -> bool:
        events = self.files[rank].events
        return bool(events) and isinstance(events[-1], DoneEvent)

    def must_end(self) -> bool:
        """A rank has failed and its peers had their moment to say why."""
        return self._failed_at is not None and now() - self._failed_at > _GRACE_SECONDS

    def overdue(self) -> Stop | None:
        """The rank that has been silent for longer than its phase allows."""
        time_now = now()
        if time_now - self._started > self._deadlines.total:
            return Stop(kind="hang", sentence=f"the trial took longer than {self._deadlines.total:.0f} s")
        for rank, heard in enumerate(self._heard):
            phase, limit = self._phase_and_limit(rank)
            if not self.is_done(rank) and time_now - heard > limit:
                return Stop(kind="hang", rank=rank, sentence=f"rank {rank} was silent for {limit:.0f} s in {phase}")
        return None

    def _phase_and_limit(self, rank: int) -> tuple[str, float]:
        events = self.files[rank].events
        phase = next((event.phase for event in reversed(events) if isinstance(event, PhaseEvent)), "process_group")
        if phase in ("process_group", "model", "engine"):
            return phase, float(getattr(self._deadlines, phase))
        if phase in ("evaluation", "gather", "teardown"):
            return phase, self._deadlines.gather
        first = not any(isinstance(event, MeasuredEvent | StepEvent) for event in events)
        step = max(self._deadlines.step, 20 * self._slowest_step)
        return phase, self._deadlines.first_step if first else step


def cgroup_oom_kills() -> int:
    """The kernel's count of OOM kills in this process's memory cgroup (v2 or v1); 0 where it cannot be read."""
    for path in _memory_cgroup_files():
        try:
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0


def _memory_cgroup_files() -> list[Path]:
    root = Path(os.environ.get("LADDER_CGROUP_ROOT", "/sys/fs/cgroup"))
    files = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            files.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    return files
