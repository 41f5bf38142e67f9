"""The interface of every launcher: run one trial to its end and return what was observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ladder.events.protocol import Event, TrialSpec
from ladder.events.trial_run import TrialRun

Listener = Callable[[int, Event], None]
"""Called for every event of a rank as it arrives, with the rank and the event."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds a rank may be silent in each phase before the trial counts as hung."""

    process_group: float = 120.0
    model: float = 300.0
    engine: float = 600.0
    first_step: float = 300.0
    step: float = 120.0
    """A later step; raised to twenty times the slowest step so far."""
    gather: float = 600.0
    total: float = 3600.0
    """The whole trial."""


class Launcher(Protocol):
    """What every launcher guarantees: `run` returns only when no process of the trial is left, but ranks that wait for
    another one, which `close` ends."""

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        """Run one trial. Raises EnvironmentFaultError if the machine cannot start one."""

    def close(self) -> None:
        """End the processes that the launcher keeps between trials."""
