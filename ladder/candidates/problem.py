"""What is trained, and on which machine: everything that decides whether a candidate can be tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ladder.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The workload and the machine of one tune, as plain numbers."""

    workload: Workload
    world_size: int
    device: Literal["cuda", "cpu"]
    memory_limit: int
    """Bytes per rank."""
    is_limited: bool = False
    """The limit is below what the device has."""
    host_memory: int
    """Bytes for all ranks together."""
    gpu_name: str | None = None
    """As the driver reports it; the speed model starts from it."""
    num_cores: int = 16
    """CPU cores of all nodes; the speed of CPU Adam depends on them."""
    num_nodes: int = 1
    nvme_path: str | None = None
    """The folder for NVMe rungs: measurements in another folder may be of another drive."""
    rates: tuple[tuple[str, float], ...] = ()
    """What was measured of the machine (`rates.rates_of`), if anything."""
    learned: tuple[tuple[str, float, float], ...] = ()
    """What earlier tunes taught about the machine: unknowns of the speed model, each with mean and deviation."""
    earlier: tuple[tuple[str, float | None, float], ...] = ()
    """What earlier tunes of the workload measured here, with any global batch: a candidate's key and the seconds of its
    micro-steps without (None: unknown) and with the optimizer."""
