"""The file to which a rank appends JSON lines, one system call each, so that a killed rank leaves complete lines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ladder.events.as_json import to_json
from ladder.events.protocol import Event, Phase, PhaseEvent, StepEvent


def now() -> float:
    """Seconds on a clock that is the same for all processes of a host."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Reporter:
    """Appends events, and remembers what the rank is doing in case it fails."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.candidate: str | None = None
        self.moment: str = "process_group"

    def close(self) -> None:
        """Nothing more is to be said of this trial."""
        os.close(self._fd)

    def send(self, event: Event) -> None:
        os.write(self._fd, to_json(event).encode() + b"\n")

    def phase(self, phase: Phase) -> None:
        self.moment = phase
        self.send(PhaseEvent(t=now(), phase=phase, candidate=self.candidate))

    def step(self, seconds: float) -> None:
        self.send(StepEvent(t=now(), candidate=self.candidate or "", seconds=seconds))

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """Names a moment inside a phase. After an error in the block, `moment` keeps this name for the report."""
        before, self.moment = self.moment, moment
        yield
        self.moment = before
