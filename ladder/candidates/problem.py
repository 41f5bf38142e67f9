"""What is trained and what on: all that decides whether something can be tried."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The workload and the machine of one tune, as plain numbers."""

    workload: Workload
    world_size: int
    device: str
    memory_limit: int
    """Bytes per rank."""
    host_memory: int
    """Bytes for all ranks together."""
    gpu_name: str | None = None
    """As the driver gives it; the prior of the speed model."""
    num_cores: int = 16
    """CPU cores of all nodes: CPU Adam's speed depends on them."""
    num_nodes: int = 1
    nvme_path: str | None = None
    """The folder of the NVMe rungs: what was measured in another one says nothing of this drive."""
