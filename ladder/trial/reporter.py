"""A rank's own file: it appends JSON lines, one system call each, so that a killed rank leaves whole lines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ladder.events.protocol import Event, Phase, PhaseEvent, StepEvent


def now() -> float:
    """Seconds on the clock that all ranks of a host share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Reporter:
    """Appends events, and remembers what the rank is doing for the error that may come."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.candidate: str | None = None
        self.moment: str = "process_group"

    def send(self, event: Event) -> None:
        os.write(self._fd, event.model_dump_json().encode() + b"\n")

    def phase(self, phase: Phase) -> None:
        self.moment = phase
        self.send(PhaseEvent(t=now(), phase=phase, candidate=self.candidate))

    def step(self, seconds: float) -> None:
        self.send(StepEvent(t=now(), candidate=self.candidate or "", seconds=seconds))

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """Names the moment inside a phase; it stays named when an error leaves the block."""
        before, self.moment = self.moment, moment
        yield
        self.moment = before
