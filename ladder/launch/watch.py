"""Watches one trial: reads the ranks' files, checks deadlines, and says when the trial has to be ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ladder.events.as_json import NotReadError
from ladder.events.protocol import (
    DoneEvent,
    Event,
    FailedEvent,
    GeneratedEvent,
    MeasuredEvent,
    Phase,
    PhaseEvent,
    StepEvent,
    TrialSpec,
    parse_event,
)
from ladder.events.trial_run import Ending
from ladder.launch.base import Deadlines, Listener
from ladder.machine.host import memory_cgroups
from ladder.units import MIB

_GRACE_SECONDS = 0.3
"""After the first rank fails, the others have this long to report their own cause; then they are killed. Chosen: a rank
reports an error at once."""
_LINGER_SECONDS = 10.0
"""How long a rank may take to end after its report is complete. Chosen: twice the 4.7 s that freeing 17 GB of pinned
memory took (measured: benchmarks/results/1xh200-pinning)."""
_TURN_SECONDS = 1.0
"""The loop checks every 20 ms. If more than this passes between two checks, the excess was a pause of ladder and ranks
together (docker pause, a suspended Slurm job, a sleeping machine) and does not count. Chosen: fifty times the usual
interval, which a busy host does not reach."""
_LOG_BYTES, _LOG_KEPT_BYTES = 16 * MIB, MIB
"""A rank's log that is longer than the first is cut to the second. Chosen: the beginning is the most useful part, and a
rank that prints endlessly must not fill the disk."""


def now() -> float:
    """Seconds on the clock that the ranks' events use."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class RankFile:
    """Reads what one rank appends; an incomplete line is left for the next read."""

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
    except NotReadError:
        return None  # a line that cannot be read counts as missing; a rank without `done` has failed


class Watch:
    """The state of one trial according to the ranks' files."""

    def __init__(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener, started: float) -> None:
        self._deadlines, self._listener, self._started = deadlines, listener, started
        self._looked, self._paused = started, 0.0
        ranks = spec.local_ranks
        self.files = {rank: RankFile(Path(spec.folder) / f"rank{rank}.jsonl") for rank in ranks}
        self._logs = [Path(spec.folder) / f"rank{rank}.log" for rank in ranks]
        self._heard = dict.fromkeys(ranks, started)
        # Kept up to date event by event: a soak test has thousands of events, and every check needs these.
        self._phase: dict[int, Phase] = dict.fromkeys(ranks, "process_group")
        self._has_stepped = dict.fromkeys(ranks, False)
        self._slowest_step = 0.0
        self._failed_at: float | None = None

    def time(self) -> float:
        """Seconds on the clock for deadlines, which stops while the trial is paused."""
        return now() - self._paused

    def leave_out_pause(self) -> None:
        """Do not count a pause since the last call. Call it in every round, right before deadlines are checked.

        The monotonic clock continues during a pause, although no rank can report.
        """
        time_now = now()
        self._paused += max(0.0, time_now - self._looked - _TURN_SECONDS)
        self._looked = time_now

    def read(self) -> None:
        """Read what the ranks have written since the last call."""
        self.leave_out_pause()
        for log in self._logs:
            _cap(log)
        for rank, file in self.files.items():
            for event in file.read_new():
                self._heard[rank] = self.time()
                self._take(rank, event)
                self._listener(rank, event)

    def _take(self, rank: int, event: Event) -> None:
        if isinstance(event, PhaseEvent):
            self._phase[rank] = event.phase
        if isinstance(event, MeasuredEvent | GeneratedEvent | StepEvent):
            self._has_stepped[rank] = True
        if isinstance(event, StepEvent):
            self._slowest_step = max(self._slowest_step, event.seconds)
        if isinstance(event, FailedEvent) and self._failed_at is None:
            self._failed_at = self.time()

    def note_exit(self, rank: int) -> None:
        """A rank has ended. Without a complete report that is a failure, whatever its exit status."""
        self.read()
        if not self.is_done(rank) and self._failed_at is None:
            self._failed_at = self.time()

    def is_done(self, rank: int) -> bool:
        events = self.files[rank].events
        return bool(events) and isinstance(events[-1], DoneEvent)

    def must_end(self) -> bool:
        """A rank has failed and the others had time to report their cause, or all are done but have not ended."""
        if self._failed_at is not None:
            return self.time() - self._failed_at > _GRACE_SECONDS
        return all(map(self.is_done, self.files)) and self.time() - max(self._heard.values()) > _LINGER_SECONDS

    def overdue(self, is_stopped: Callable[[int], bool] = lambda rank: False) -> Ending | None:
        """The ending of a trial in which a rank has been silent for longer than its phase allows; None otherwise.

        The other ranks then wait in a collective and are silent too. If the process of one `is_stopped`, it is named.
        """
        time_now = self.time()
        if time_now - self._started > self._deadlines.total:
            return Ending(kind="hang", sentence=f"the trial took longer than {self._deadlines.total:.0f} s")
        waiting = [rank for rank in self.files if not self.is_done(rank)]
        silent = [rank for rank in waiting if time_now - self._heard[rank] > self._phase_and_limit(rank)[1]]
        if not silent:
            return None
        phase, limit = self._phase_and_limit(silent[0])
        if (found := self.stopped(is_stopped, f" and the trial was silent for {limit:.0f} s in {phase}")) is not None:
            return found
        sentence = f"rank {silent[0]} was silent for {limit:.0f} s in {phase}"
        return Ending(kind="hang", rank=silent[0], sentence=sentence)

    def stopped(self, is_stopped: Callable[[int], bool], more: str = "") -> Ending | None:
        """The ending of a trial in which the process of a rank is stopped, with `more` words; None if none is."""
        rank = next((rank for rank in self.files if not self.is_done(rank) and is_stopped(rank)), None)
        if rank is None:
            return None
        return Ending(kind="hang", rank=rank, sentence=f"rank {rank} is stopped (SIGSTOP){more}", is_stopped=True)

    def _phase_and_limit(self, rank: int) -> tuple[str, float]:
        phase = self._phase[rank]
        if phase in ("process_group", "model", "engine"):
            return phase, float(getattr(self._deadlines, phase))
        if phase in ("evaluation", "gather", "teardown"):
            return phase, self._deadlines.gather
        step = max(self._deadlines.step, 20 * self._slowest_step)
        return phase, step if self._has_stepped[rank] else self._deadlines.first_step


def _cap(log: Path) -> None:
    """Cut a log that is too long, so that a rank that prints endlessly does not fill the disk."""
    with suppress(OSError):  # it may not exist yet
        if log.stat().st_size > _LOG_BYTES:
            os.truncate(log, _LOG_KEPT_BYTES)  # the rank appends, so it continues from here


class OomKills:
    """Counts the kernel's OOM kills from now on in the memory cgroup (v2 or v1) of process `pid`.

    If there were any in a trial, a rank that got SIGKILL ran out of host memory.
    """

    def __init__(self, pid: int) -> None:
        self._files = [
            cgroup.folder / ("memory.events" if cgroup.v2 else "memory.oom_control") for cgroup in memory_cgroups(pid)
        ]
        self._before = self._count()

    def since(self) -> int:
        """How many there were since."""
        return max(0, self._count() - self._before)

    def _count(self) -> int:
        counts = (count for path in (*self._files, Path("/proc/vmstat")) if (count := _oom_kill(path)) is not None)
        return next(counts, 0)  # the count of the whole machine only if no cgroup has one


def _oom_kill(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        return None
    return None
