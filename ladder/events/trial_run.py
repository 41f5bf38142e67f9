"""One trial as observed from outside: what its ranks reported, how they ended, and what NVML measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ladder.events.protocol import Event, TrialSpec


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why the launcher ended a trial."""

    kind: Literal["hang", "cancelled", "host_oom", "lost_server", "environment"]
    """`host_oom`: a scheduler ended it for the host memory that it used. `environment`: the machine is at fault and the
    tune must end; earlier measurements are kept."""
    sentence: str
    rank: int | None = None
    is_stopped: bool = False
    """The rank's process is stopped, so that it is not one that only waits for another rank."""


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """What NVML reported about the GPUs during one measurement."""

    utilisation: float | None
    """Mean duty cycle over GPUs, 0 to 1."""
    watts: float | None
    """Mean power of all GPUs together."""
    peak_bytes: int | None
    """The most memory in use on any GPU, minus what was in use before the trial."""
    others: float | None = None
    """Of the time of the GPU that others used most, what programs took that ran there before the trial."""


@dataclass(kw_only=True)
class TrialRun:
    """One trial as observed from outside. Times are seconds on CLOCK_MONOTONIC."""

    spec: TrialSpec
    events: list[list[Event]]
    """By rank, in the order written."""
    exits: dict[int, int] = field(default_factory=dict)
    """Exit status by rank; negative for a signal."""
    killed: frozenset[int] = frozenset()
    """The ranks that the launcher killed; their exit status says nothing."""
    stop: Ending | None = None
    oom_kills: int = 0
    """The number of OOM kills that the kernel counted in our cgroup during the trial."""
    requested: float = 0.0
    started: float = 0.0
    """When the ranks existed."""
    ended: float = 0.0
    """When no process and no GPU memory of the trial was left."""
    device_use: dict[str, DeviceUse] = field(default_factory=dict)
    """By candidate key."""
    nodes: tuple[str, ...] = ()
    """By rank, the name of its node; empty on this host alone."""
    stays: bool = False
    """Its ranks wait for another trial. They have ended well, and have no exit status."""
