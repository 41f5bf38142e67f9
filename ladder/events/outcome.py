"""How a trial ended for a candidate, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OutcomeKind = Literal[
    "fits", "gpu_oom", "host_oom", "pinned_oom", "disk_full", "hang", "crash", "unsupported", "cancelled"
]
Purpose = Literal["measure", "probe", "proof"]
"""Of a trial: a probe measures its candidate on a model of a few layers, so what it saw is not the candidate's."""
MEMORY_OUTCOMES: frozenset[OutcomeKind] = frozenset({"gpu_oom", "host_oom", "pinned_oom", "disk_full"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A typed ending with its evidence. For every kind but `fits`, `sentence` says what happened, where and to whom."""

    kind: OutcomeKind
    sentence: str = ""
    rank: int | None = None
    moment: str | None = None
    """Where in its trial it ended: a phase, or inside one a part of the step as the memory model names them (forward,
    backward, step); or why no trial speaks of it (`ladder/search/space.py`)."""
    bytes_asked: int | None = None
    bytes_free: int | None = None
    """Free under the limit when the request failed."""
    host_memory: int | None = None
    """For what ran out of host memory: all that its ranks might use."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a trial saw of one candidate. Seconds are of the slowest rank; bytes are of the fullest."""

    accumulate_seconds: float | None
    """Median of a micro-step without the optimizer; None when the candidate never accumulates."""
    boundary_seconds: float
    """Median of a micro-step with the optimizer step."""
    spread: float
    """Half the interquartile range of the optimizer steps over their median: the noise seen."""
    num_steps: int
    """Timed optimizer steps."""
    skipped_steps: int = 0
    """Optimizer steps that overflow skipped during timing; their times are not counted."""
    peak_allocated: int
    peak_reserved: int
    peak_device: int
    """All the process holds, context and NCCL included, as NVML sees it; on CPU, data above the process's start."""
    outside_torch: int
    """`peak_device` − `peak_reserved` at the same moment: context, NCCL, libraries."""
    peak_host: int
    """Resident host memory of all ranks together."""
    alloc_retries: int = 0
    """Times the allocator emptied its cache and tried again while timing: thrashing."""
    losses: tuple[float, ...] = ()
    utilisation: float | None = None
    """Mean of NVML's duty cycle over ranks, 0 to 1."""
    watts: float | None = None
    """Mean power of all GPUs together."""
    sm_clock_mhz: float | None = None

    def step_seconds(self, accumulation: int) -> float:
        """Seconds of an optimizer step of `accumulation` micro-steps. ValueError if it was not measured for several."""
        if accumulation == 1:
            return self.boundary_seconds
        if self.accumulate_seconds is None:
            raise ValueError("this candidate was measured without accumulation")
        return (accumulation - 1) * self.accumulate_seconds + self.boundary_seconds


@dataclass(frozen=True, kw_only=True)
class Record:
    """One candidate in one trial: the unit of history."""

    candidate_key: str
    trial: str
    purpose: Purpose
    outcome: Outcome
    measurement: Measurement | None = None
    tokens_per_second: float | None = None
    """Of all ranks together; None for what does not fit, and for a probe."""
    warnings: tuple[str, ...] = field(default=())
    nvme_path: str | None = None
    """The folder that its engine swapped to; None without NVMe."""
