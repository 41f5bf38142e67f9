"""What every launcher does: run one trial to its end, and say what was seen of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ladder.events.protocol import Event, TrialSpec
from ladder.events.trial_run import TrialRun

Listener = Callable[[int, Event], None]
"""Called with a rank and its event, as they come."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Seconds a rank may be silent in each phase before the trial counts as hung."""

    process_group: float = 120.0
    model: float = 300.0
    engine: float = 600.0
    first_step: float = 300.0
    step: float = 120.0
    """A later step; raised to twenty times the slowest step seen."""
    gather: float = 600.0
    total: float = 3600.0
    """The whole trial."""


class Launcher(Protocol):
    """One contract, tested for every launcher: `run` returns only when nothing of the trial is left."""

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        """Run one trial. Raises EnvironmentFaultError when the machine cannot even start one."""

    def close(self) -> None:
        """End what the launcher itself keeps running."""
