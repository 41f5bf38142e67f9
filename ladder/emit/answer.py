"""The answer of a tune: the winning candidate, what was measured of it, and the proof that it fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ladder.candidates import Candidate
from ladder.events.outcome import Measurement
from ladder.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Everything the emitted files say. Bytes and seconds inside; the files convert to GiB."""

    workload: Workload
    candidate: Candidate
    measurement: Measurement
    """Of the winner; bytes are of the fullest rank, seconds of the slowest."""
    tokens_per_second: float
    """Over all ranks, at the workload's own global batch."""
    step_seconds: float
    """One optimizer step, accumulation included."""
    mfu: float | None
    """Model FLOPs utilisation, 0 to 1; None on a GPU whose peak is not known."""
    world_size: int
    device: Literal["cuda", "cpu"]
    gpu_name: str | None
    memory_limit: int
    """Bytes a rank may use on its GPU."""
    host_threads: int
    """OMP_NUM_THREADS each rank had when it was measured."""
    allocator: dict[str, str]
    """What the environment told the allocators of torch and of the C library on the GPUs."""
    nvme_path: Path | None
    versions: dict[str, str]
    """Version by library: torch, deepspeed, transformers, accelerate, ladder, …"""
    run_dir: Path
    proof: dict[str, Any]
    """Summary of the run in fresh processes: steps, evaluation, gathered weights, tokens_per_second."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = {
            "world_size": self.world_size,
            "memory_limit": self.memory_limit,
            "host_threads": self.host_threads,
            "tokens_per_second": self.tokens_per_second,
        }
        for name, value in counts.items():
            if not value > 0:
                raise ValueError(f"{name} must be above zero, not {value}")
        sequences = self.candidate.sequences(self.world_size)
        if sequences != self.workload.global_batch_size:
            raise ValueError(
                f"{self.candidate.key} on {self.world_size} ranks takes {sequences} sequences a step, "
                f"the workload asks for {self.workload.global_batch_size}"
            )

    @property
    def headroom(self) -> float:
        """Device memory left at the peak, as a fraction of the limit; negative if the peak went over it."""
        return 1 - self.measurement.peak_device / self.memory_limit
