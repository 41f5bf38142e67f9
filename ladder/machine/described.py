"""The machine as plain values. Nothing here looks at a real one, so a plan needs neither NVML nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Without it, memory that is free but not in one piece ends trials: measured, 10.1 GiB reserved for 7.7 allocated.
GROWING = "expandable_segments:True"
# What offload pins is touched by eight threads first, in huge pages. Measured: 17 GB are had in 1.6 s instead of 8.5
# and given back in 0.6 instead of 4.7, neither copies nor the optimizer are slower on them, and a tune took 63 s
# instead of 109.
_PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
BEST_FOR_TRIALS = {"PYTORCH_CUDA_ALLOC_CONF": f"{GROWING},{_PINNING}", **HUGE_PAGES}
"""What the allocators of torch and of the C library are told, but where the user told them otherwise."""


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    total_bytes: int
    fault: str = ""
    """Why no tune can use it: a sentence that may go on."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as the tune may use it."""

    device: Literal["cuda", "cpu"]
    world_size: int
    gpus: tuple[Gpu, ...] = ()
    memory_limit: int
    """Bytes each rank may hold in all: on a GPU as NVML sees it, on CPU above its data segment at the start."""
    host_memory: int
    """Bytes of host memory all ranks may hold together."""
    num_cores: int
    num_nodes: int = 1
    nvme_path: Path | None = None
    nvme_write_speed: float | None = None
    """Bytes a second that `nvme_path` took when it was tried."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """By rung name: why it cannot work here."""
    allocator: dict[str, str] = field(default_factory=lambda: dict(BEST_FOR_TRIALS))
    """What the environment tells the allocators of torch and of the C library on a machine with GPUs."""

    @property
    def gpu_name(self) -> str | None:
        return self.gpus[0].name if self.gpus else None

    @property
    def host_threads(self) -> int:
        """Threads a rank gets for work on the host."""
        return max(1, self.num_cores // self.world_size)
