"""Host memory and disk space of a simulated rank, as a list of DeepSpeed's buffers.

PyTorch's pinned allocator rounds up to powers of two (aten/src/ATen/core/CachingHostAllocator.h). Names are those of
DeepSpeed 0.19.8, runtime/zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ladder.simulation.assignment import Assignment
from ladder.units import GIB

_PROCESS = 1.68 * GIB
"""Resident memory of a rank that offloads nothing (measured: 1.62 to 1.79 GiB in recorded sweeps without offload)."""
_SWAP_BUFFERS, _PARAMETER_BUFFERS = 4, 5
"""`buffer_count` of the emitted offload sections."""


@dataclass(frozen=True)
class HostUse:
    """Bytes of one rank."""

    resident: float
    """The process and what it offloads."""
    pinned: float
    """The page-locked part."""
    disk: float

    @property
    def offloaded(self) -> float:
        return self.resident - _PROCESS


def host_use(assignment: Assignment) -> HostUse:
    """The host memory and disk space of one rank of `assignment`."""
    pinned = [_power_of_two(size) for size in assignment.pinned]
    held = max(sum(_pageable(assignment)) + sum(pinned), assignment.loaded)
    return HostUse(resident=_PROCESS + held, pinned=sum(pinned), disk=_on_disk(assignment))


def pinned_by_deepspeed(assignment: Assignment) -> Iterator[float]:
    """DeepSpeed's buffers."""
    share, model = assignment.share, assignment.workload.model
    if assignment.candidate.offload_activations:
        for layer, block in enumerate(assignment.network.blocks):
            if assignment.recomputes(layer) and block.reached:
                yield 2.0 * assignment.tokens * model.hidden_size
    if assignment.optimizer_device == "cpu" and assignment.stage < 3:
        yield assignment.effects.master_bytes * share  # single_partition_of_fp32_groups
        yield max(4.0, assignment.effects.gradient_bytes) * share  # its .grad
        yield 2.0 * share  # param_buffer_of_bit16_for_cpu_offload_groups
        yield 2.0 * assignment.network.largest_gradient  # temp_grad_buffer_for_cpu_offload
        if assignment.stage == 2 and assignment.accumulates:
            yield from (2.0 * elements for elements in _own_parameters(assignment))  # accumulated_grads_in_cpu
    elif assignment.optimizer_device == "cpu":
        yield from (4.0 * elements for elements in _sub_groups(assignment))  # fp32_partitioned_groups_flat[i].grad
        yield 2.0 * share  # grad_partitions_flat_buffer
    elif assignment.optimizer_device == "nvme":
        yield from [4.0 * max(_sub_groups(assignment))] * _SWAP_BUFFERS
        yield 2.0 * share
    if assignment.parameter_device == "cpu":
        yield from (
            2.0 * elements / assignment.ranks for elements in _parameters(assignment)
        )  # where zero.Init made them
        yield 2.0 * share  # param_groups_fp16_flat_cpu_memory, of those that the optimizer gets
    elif assignment.parameter_device == "nvme":
        yield from [
            2.0 * max(assignment.network.table, assignment.network.head) / assignment.ranks
        ] * _PARAMETER_BUFFERS


def pinned_by_fsdp2(assignment: Assignment) -> Iterator[float]:
    """FSDP2's CPUOffloadPolicy: each parameter's fp32 shard, and its gradient, which `to` copies to pinned memory."""
    if assignment.parameter_device == "cpu":
        for elements in _parameters(assignment):
            yield from [4.0 * elements / assignment.ranks] * 2


def _pageable(assignment: Assignment) -> Iterator[float]:
    if assignment.optimizer_device == "cpu":
        yield assignment.moments * assignment.effects.moment_bytes * assignment.share
        if assignment.masters_in_pages:
            yield assignment.effects.master_bytes * assignment.share


def _on_disk(assignment: Assignment) -> float:
    states = assignment.effects.master_bytes + assignment.moments * assignment.effects.moment_bytes
    optimizer = states * assignment.share if assignment.optimizer_device == "nvme" else 0.0
    return optimizer + (assignment.held_share if assignment.parameter_device == "nvme" else 0.0)


def _own_parameters(assignment: Assignment) -> list[int]:
    """Elements of the trained matrices that belong to one rank, with `round_robin_gradients`."""
    network = assignment.network
    outside = [network.trained_table, 0 if assignment.workload.model.tied else network.trained_head]
    products = [each for block in network.blocks for each in block.operations if each.weight[0] and each.trained]
    return [*(size for size in outside if size), *(each.elements for each in products)][:: assignment.ranks]


def _parameters(assignment: Assignment) -> list[int]:
    """Elements of each matrix and table, in units of 16 bits."""
    network = assignment.network
    tables = [network.table] if assignment.workload.model.tied else [network.table, network.head]
    products = [each for block in network.blocks for each in block.operations if each.weight[0]]
    return [*tables, *(each.gathered for each in products)]


def _sub_groups(assignment: Assignment) -> list[int]:
    size = int(assignment.knobs["sub_group_size"])
    whole, rest = divmod(assignment.share, size)
    return [size] * whole + ([rest] if rest else [])


def _power_of_two(num_bytes: float) -> float:
    size = 1
    while size < num_bytes:
        size *= 2
    return float(size)
