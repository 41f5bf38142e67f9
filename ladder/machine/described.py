"""The machine as plain values. Nothing here inspects a real one, so a plan needs neither NVML nor a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

# Without it, trials fail because of fragmentation (measured: 10.1 GiB reserved for 7.7 GiB allocated).
GROWING = "expandable_segments:True"
# Eight threads prepare the host memory that offload pins, in huge pages. Measured: pinning 17 GB takes 1.6 s instead of
# 8.5 s and releasing it 0.6 s instead of 4.7 s; copies and the optimizer are as fast as before; a tune took 63 s
# instead of 109 s.
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
BEST_FOR_TRIALS = {"PYTORCH_CUDA_ALLOC_CONF": f"{GROWING},{PINNING}", **HUGE_PAGES}
"""Settings for the allocators of torch and of the C library; the user's own settings override them."""


_WHOLE = 0.99
"""Of a device, from which on a limit is none. Chosen: under another driver, or on another node, a GPU of the same name
has a little less memory."""


def memory_of_cpu_rank(host_memory: int, world_size: int) -> int:
    """Bytes that each CPU rank may use if nobody says how many."""
    return int(0.8 * host_memory / world_size)


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    total_bytes: int
    fault: str = ""
    """Why no tune can use it: the beginning of a sentence. Empty if it is fine."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The part of the machine that the tune may use."""

    device: Literal["cuda", "cpu"]
    world_size: int
    gpus: tuple[Gpu, ...] = ()
    memory_limit: int
    """Bytes that a rank may use: on a GPU all that NVML counts, on CPU the growth of its data segment."""
    host_memory: int
    """Bytes of host memory that all ranks together may use."""
    num_cores: int
    num_nodes: int = 1
    elsewhere: Mapping[str, Any] = field(default_factory=dict)
    """What tells the nodes from others (`known_machine.facts_of_nodes`); empty if it is this host."""
    nvme_path: Path | None = None
    nvme_write_speed: float | None = None
    """Measured write speed of `nvme_path` in bytes per second."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """By rung name: why it cannot work here."""
    allocator: dict[str, str] = field(default_factory=lambda: dict(BEST_FOR_TRIALS))
    """Environment variables for the allocators of torch and of the C library on a machine with GPUs."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """What `ladder doctor --measure` found (`rates.rates_of`); empty where it has not run."""
    learned: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What earlier tunes here taught about the machine (`KnownMachine.learned`)."""
    earlier: tuple[tuple[str, float | None, float], ...] = ()
    """What earlier tunes here measured of the workload (`Problem.earlier`)."""

    @property
    def gpu_name(self) -> str | None:
        return self.gpus[0].name if self.gpus else None

    @property
    def is_limited(self) -> bool:
        """Whether a rank may use less than its device has."""
        has = [gpu.total_bytes for gpu in self.gpus]
        if self.device == "cpu":
            has = [memory_of_cpu_rank(self.host_memory, self.world_size)]
        return bool(has) and self.memory_limit < _WHOLE * min(has)

    @property
    def host_threads(self) -> int:
        """Threads per rank for work on the host."""
        return max(1, self.num_cores // self.world_size)


_CORES_OF_A_GPU = 16
"""Assumed where no machine is named; the predicted speed of CPU Adam depends on it. Chosen: usual for a rented GPU."""
NO_LIMIT = 1 << 60
"""Bytes of host memory where no machine is named. Chosen: more than any host has."""


def bare_machine(num_gpus: int, memory_limit: int, *, num_nodes: int = 1, host_memory: int | None = None) -> Machine:
    """GPUs of which only the memory is known, in bytes each; `host_memory` is of all nodes."""
    return Machine(
        device="cuda",
        world_size=num_gpus,
        memory_limit=memory_limit,
        host_memory=host_memory or NO_LIMIT,
        num_cores=_CORES_OF_A_GPU * num_gpus,
        num_nodes=num_nodes,
    )
