"""One trial as seen from outside: what its ranks reported, how they ended, and what NVML saw meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ladder.events.protocol import Event, TrialSpec


@dataclass(frozen=True, kw_only=True)
class Ending:
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
    stop: Ending | None = None
    oom_kills: int = 0
    """How far the kernel's count of OOM kills in our cgroup moved."""
    requested: float = 0.0
    started: float = 0.0
    """The ranks exist."""
    ended: float = 0.0
    """No process and no device memory of the trial is left."""
    device_use: dict[str, DeviceUse] = field(default_factory=dict)
    """By candidate key."""
