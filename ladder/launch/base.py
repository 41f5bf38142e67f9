"""What every launcher does: run one trial to its end, and say what was seen of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ladder.protocol import Event, TrialSpec

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


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Why the launcher itself ended a trial."""

    kind: Literal["hang", "cancelled", "lost_server", "environment"]
    """`environment`: the machine is at fault and the tune must end; what was measured before stands."""
    sentence: str
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """NVML's view of the GPUs over one measurement."""

    utilisation: float | None
    """Mean duty cycle over GPUs, 0 to 1."""
    watts: float | None
    """Mean power of all GPUs together."""
    sm_clock_mhz: float | None
    peak_bytes: int | None
    """The most any one GPU held, less what it held before the trial."""


@dataclass(kw_only=True)
class TrialRun:
    """One trial as seen from outside. Times are seconds on CLOCK_MONOTONIC."""

    spec: TrialSpec
    events: list[list[Event]]
    """By rank, in the order written."""
    exits: dict[int, int] = field(default_factory=dict)
    """Exit status by rank; negative is a signal."""
    killed: frozenset[int] = frozenset()
    """The ranks that the launcher itself killed: their deaths are no evidence."""
    stop: Stop | None = None
    oom_kills: int = 0
    """How far the kernel's count of OOM kills in our cgroup moved."""
    requested: float = 0.0
    started: float = 0.0
    """The ranks exist."""
    ended: float = 0.0
    """No process and no device memory of the trial is left."""
    device_use: dict[str, DeviceUse] = field(default_factory=dict)
    """By candidate key."""


class Launcher(Protocol):
    """One contract, tested for every launcher: `run` returns only when nothing of the trial is left."""

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        """Run one trial. Raises EnvironmentFaultError when the machine cannot even start one."""

    def close(self) -> None:
        """End what the launcher itself keeps running."""
