"""The outcome of a trial for a candidate, and its measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OutcomeKind = Literal[
    "fits", "gpu_oom", "host_oom", "pinned_oom", "disk_full", "hang", "crash", "unsupported", "cancelled"
]
Purpose = Literal["measure", "probe", "proof"]
"""The purpose of a trial. A probe uses a model with a few layers, so its figures are not the candidate's own."""
_BUSY = 0.1
"""Of the time of cores or of a GPU: what other programs take above it is worth a word. Chosen."""
MEMORY_OUTCOMES: frozenset[OutcomeKind] = frozenset({"gpu_oom", "host_oom", "pinned_oom", "disk_full"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How it ended, with the evidence. Except for `fits`, `sentence` says what happened, where and on which rank."""

    kind: OutcomeKind
    sentence: str = ""
    rank: int | None = None
    moment: str | None = None
    """Where in its trial it ended: a phase or a part of a step (forward, backward, step); or why there was no trial
    (`ladder/search/space.py`)."""
    bytes_asked: int | None = None
    bytes_free: int | None = None
    """Free under the limit when the allocation failed."""
    host_memory: int | None = None
    """If host memory ran out: how much all ranks together were allowed to use."""


@dataclass(frozen=True, kw_only=True)
class Alike:
    """What is measured of a candidate and is the same on all ranks."""

    skipped_steps: int = 0
    """Optimizer steps that were skipped because of overflow during timing; their times do not count."""
    loader_share: float | None = None
    """Of an optimizer step, waiting for a script's own data loader; None where nothing was loaded."""
    padding: float | None = None
    """Share of the tokens that were padding, of a script's own batches."""
    new_length_seconds: float | None = None
    """What a micro-step takes longer on a batch of a length that no batch had before; None where all have one length,
    and where steps are too long for it to matter."""
    new_length_share: float | None = None
    """Of a training's micro-steps: those with such a batch. The seconds above contain this share of it."""
    compile_seconds: float | None = None
    """What the first step took longer than the next, because it compiled; None where nothing is compiled."""
    gradient_clipping: float | None = None
    """What a script's own loop clips gradients to, seen in its proof; None where it says so before, or nowhere."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Alike):
    """What a trial measured of one candidate. Seconds are of the slowest rank, bytes of the rank that uses most."""

    accumulate_seconds: float | None
    """Median of a micro-step without the optimizer; None without gradient accumulation."""
    boundary_seconds: float
    """Median of a micro-step with the optimizer step."""
    spread: float
    """The noise: half the interquartile range of the optimizer steps, divided by their median."""
    window_speeds: tuple[float, ...] = ()
    """Of consecutive windows of the optimizer steps, divided by the speed of a step of median seconds."""
    num_steps: int
    """Timed optimizer steps."""
    peak_allocated: int
    peak_reserved: int
    peak_device: int
    """All memory of the process according to NVML, with context and NCCL; on CPU, its data segment since the start."""
    outside_torch: int
    """`peak_device` − `peak_reserved` at the same moment: context, NCCL, libraries."""
    peak_host: int
    """Resident host memory of all ranks together at their peaks, the loading of weights included."""
    alloc_retries: int = 0
    """How often the allocator emptied its cache and tried again during timing."""
    others: float | None = None
    """Of the time of a rank's cores, what other programs took where none was idle: the most of any rank."""
    others_on_gpu: float | None = None
    """Of a GPU's time, what other programs took: the most of any GPU."""
    held_host: int | None = None
    """As `peak_host`, but once it was measured: loading weights may take more, and no prediction goes by that."""
    losses: tuple[float, ...] = ()
    utilisation: float | None = None
    """Mean of NVML's duty cycle over ranks, 0 to 1."""
    watts: float | None = None
    """Mean power of all GPUs together."""
    matrix_flops: float | None = None
    """Operations per second of the slowest rank in the model's matrix products alone; None where not timed."""

    @property
    def disturbance(self) -> float:
        """The larger of `others` and `others_on_gpu`, if that is worth a word; otherwise 0."""
        most = max(self.others or 0.0, self.others_on_gpu or 0.0)
        return most if most > _BUSY else 0.0

    @property
    def disturbed(self) -> str:
        """What other programs took most of, in words."""
        return "the ranks' cores" if (self.others or 0.0) >= (self.others_on_gpu or 0.0) else "a GPU's time"

    def step_seconds(self, accumulation: int) -> float:
        """Seconds of an optimizer step of `accumulation` micro-steps. ValueError if measured without accumulation."""
        if accumulation == 1:
            return self.boundary_seconds
        if self.accumulate_seconds is None:
            raise ValueError("this candidate was measured without accumulation")
        return (accumulation - 1) * self.accumulate_seconds + self.boundary_seconds


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of one candidate in one trial; a history consists of these."""

    candidate_key: str
    trial: str
    purpose: Purpose
    outcome: Outcome
    measurement: Measurement | None = None
    tokens_per_second: float | None = None
    """Of all ranks together; None if it does not fit, and for a probe."""
    warnings: tuple[str, ...] = field(default=())
    nvme_path: str | None = None
    """The folder to which its engine offloaded; None without NVMe."""

    @property
    def joules_per_token(self) -> float | None:
        """Energy of all GPUs; None where it was not measured."""
        watts = self.measurement.watts if self.measurement is not None else None
        return watts / self.tokens_per_second if watts and self.tokens_per_second else None
