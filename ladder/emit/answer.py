"""The answer of a tune: the winning candidate, its measurement, and the proof that it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ladder.candidates import Candidate
from ladder.events.outcome import Measurement
from ladder.units import in_words
from ladder.workload.workload import Workload

_CACHED_LATER = 0.01
"""What a GPU may hold beyond its proof in a longer training of the user's script, as a share: the cache of torch's
allocator. Measured: up to 0.8 % on H200s (benchmarks/promise.py; results/1xh200-scripts). Chosen: a little more."""


Starter = Literal["torchrun", "accelerate", "deepspeed"]


@dataclass(frozen=True)
class OwnWords:
    """A command of the user's script that trains an answer without ladder."""

    words: tuple[str, ...]
    """The program and its arguments, with those that the answer changes."""
    by: Starter
    """What starts them."""
    files: Mapping[Path, str] = field(default_factory=dict)
    """Copies of its configuration files, which the words name."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Everything that the emitted files contain, in bytes and seconds; the files convert to GiB."""

    workload: Workload
    candidate: Candidate
    measurement: Measurement
    """Of the winner; bytes are of the rank that uses most, seconds of the slowest."""
    tokens_per_second: float
    """Of all ranks together, with the workload's global batch."""
    tokens_per_second_range: tuple[float, float] | None = None
    """The lowest and the highest of a training, where the machine's speed varies; None if the one figure holds."""
    step_seconds: float
    """One optimizer step, accumulation included."""
    mfu: float | None
    """Model FLOP/s utilisation, 0 to 1; None for a GPU whose peak is unknown."""
    world_size: int
    num_nodes: int = 1
    """Each has as many ranks."""
    device: Literal["cuda", "cpu"]
    gpu_name: str | None
    memory_limit: int
    """Bytes that a rank may use on its GPU."""
    is_limited: bool = False
    """The limit is below what the GPU has."""
    host_threads: int
    """OMP_NUM_THREADS of each rank when it was measured."""
    allocator: dict[str, str]
    """Environment variables for the allocators of torch and of the C library."""
    nvme_path: Path | None
    versions: dict[str, str]
    """Version by library: torch, deepspeed, transformers, accelerate, ladder, …"""
    run_dir: Path
    proof: dict[str, Any]
    """Summary of the run in fresh processes: steps, evaluation, gathered weights, tokens_per_second."""
    warnings: tuple[str, ...] = ()
    learning_rate: float | None = None
    """Of the optimizer in the configuration; None if the script brings its own."""
    bound: float | None = None
    """Tokens/s if a step were only matrix products, at their measured rate; None where that was not measured."""
    as_it_stands: dict[str, Any] | None = None
    """How the user's script trains as its command stands: candidate, outcome and speed; None if it was not tried."""
    own_words: OwnWords | None = None
    """None if `ladder run` has to start the user's script."""
    plain: Answer | None = None
    """The answer without DeepSpeed, where that is faster."""

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
                f"{self.candidate.key} on {self.world_size} ranks has {sequences} sequences per step, "
                f"but the workload has {self.workload.global_batch_size}"
            )

    @property
    def headroom(self) -> float:
        """GPU memory left at the peak, as a fraction of the limit; negative if the peak is above the limit."""
        return 1 - self.measurement.peak_device / self.memory_limit

    @property
    def promised_speed(self) -> str:
        """Its one figure or its range, with the unit."""
        return f"{in_words(self.tokens_per_second_range or (self.tokens_per_second,))} tokens/s"

    @property
    def promised_device(self) -> int | None:
        """Bytes that a GPU holds at most in a whole training of the user's script; None without one and on a CPU.

        At the limit torch's allocator empties its cache, so there the limit is the most.
        """
        if self.workload.script is None or self.device == "cpu":
            return None
        peak = self.measurement.peak_device
        return max(peak, min(round(peak * (1 + _CACHED_LATER)), self.memory_limit))
