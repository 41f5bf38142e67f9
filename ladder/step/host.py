"""Host memory and disk space of a rank, as a list of an engine's buffers.

PyTorch's pinned allocator rounds up to powers of two (aten/src/ATen/core/CachingHostAllocator.h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ladder.step.assignment import Assignment
from ladder.units import GIB

PROCESS = 1.68 * GIB
"""Resident memory of a rank that offloads nothing. Measured: 1.62 to 1.79 GiB in recorded sweeps without offload."""


@dataclass(frozen=True)
class HostUse:
    """Bytes of one rank beside its process."""

    held: float
    """All that it has in host memory."""
    pinned: float
    """The page-locked part."""
    disk: float


def host_use(assignment: Assignment) -> HostUse:
    """The host memory and disk space of one rank of `assignment`."""
    pinned = sum(_power_of_two(size) for size in assignment.pinned())
    held = max(assignment.pageable() + pinned, assignment.loaded)
    return HostUse(held=held, pinned=pinned, disk=assignment.disk())


def parameters_of(assignment: Assignment) -> list[int]:
    """Elements of each matrix and table, in units of 16 bits."""
    network = assignment.network
    tables = [network.table] if assignment.workload.model.tied else [network.table, network.head]
    products = [each for block in network.blocks for each in block.operations if each.weight[0]]
    return [*tables, *(each.gathered for each in products)]


def _power_of_two(num_bytes: float) -> float:
    """The size of a block of PyTorch's pinned allocator: the next power of two."""
    return float(1 << max(0, math.ceil(num_bytes) - 1).bit_length()) if num_bytes else 0.0
