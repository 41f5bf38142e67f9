"""The host's memory and disk that a simulated rank takes: DeepSpeed's buffers, made one by one.

PyTorch's pinned allocator hands out powers of two (aten/src/ATen/core/CachingHostAllocator.h); other memory is what it
is. Names are those of DeepSpeed 0.19.8, runtime/zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ladder.simulation.plan import Plan
from ladder.units import GIB

_PROCESS = 1.68 * GIB
"""Resident memory of a rank that offloads nothing: 1.62 to 1.79 GiB in the recorded sweeps without offload."""
_SWAP_BUFFERS, _PARAMETER_BUFFERS = 4, 5
"""`buffer_count` of the emitted offload sections."""


@dataclass(frozen=True)
class HostUse:
    """Bytes of one rank."""

    resident: float
    pinned: float
    """The page-locked part of it."""
    disk: float


def host_use(plan: Plan) -> HostUse:
    """What a rank of `plan` takes of its host."""
    pinned = [_power_of_two(size) for size in _pinned(plan)]
    return HostUse(resident=_PROCESS + sum(_pageable(plan)) + sum(pinned), pinned=sum(pinned), disk=_on_disk(plan))


def _pinned(plan: Plan) -> Iterator[float]:
    share, model = plan.share, plan.workload.model
    if plan.candidate.offload_activations:
        for layer in range(model.num_layers):
            if plan.recomputes(layer):
                yield 2.0 * plan.tokens * model.hidden_size
    if plan.optimizer_device == "cpu" and plan.stage < 3:
        yield plan.effects.master_bytes * share  # single_partition_of_fp32_groups
        yield max(4.0, plan.effects.gradient_bytes) * share  # its .grad
        yield 2.0 * share  # param_buffer_of_bit16_for_cpu_offload_groups
        yield 2.0 * max(plan.network.table, plan.network.head)  # temp_grad_buffer_for_cpu_offload
        if plan.stage == 2 and plan.accumulates:
            yield from (2.0 * elements for elements in _own_parameters(plan))  # accumulated_grads_in_cpu
    elif plan.optimizer_device == "cpu":
        yield from (4.0 * elements for elements in _sub_groups(plan))  # fp32_partitioned_groups_flat[i].grad
        yield 2.0 * share  # grad_partitions_flat_buffer
    elif plan.optimizer_device == "nvme":
        yield from [4.0 * max(_sub_groups(plan))] * _SWAP_BUFFERS
        yield 2.0 * share
    if plan.parameter_device == "cpu":
        yield from (2.0 * elements / plan.ranks for elements in _parameters(plan))  # where zero.Init made them
        yield 2.0 * share  # param_groups_fp16_flat_cpu_memory
    elif plan.parameter_device == "nvme":
        yield from [2.0 * max(plan.network.table, plan.network.head) / plan.ranks] * _PARAMETER_BUFFERS


def _pageable(plan: Plan) -> Iterator[float]:
    if plan.optimizer_device == "cpu":
        yield plan.moments * plan.effects.moment_bytes * plan.share
        if plan.stage == 3:
            yield plan.effects.master_bytes * plan.share


def _on_disk(plan: Plan) -> float:
    states = plan.effects.master_bytes + plan.moments * plan.effects.moment_bytes
    optimizer = states * plan.share if plan.optimizer_device == "nvme" else 0.0
    return optimizer + (2.0 * plan.share if plan.parameter_device == "nvme" else 0.0)


def _own_parameters(plan: Plan) -> list[int]:
    """Elements of the parameters that belong to one rank; each rank has its turn (`round_robin_gradients`)."""
    return _parameters(plan)[:: plan.ranks]


def _parameters(plan: Plan) -> list[int]:
    """Elements of each matrix and table."""
    model = plan.workload.model
    tables = [plan.network.table] if model.tied else [plan.network.table, plan.network.head]
    blocks = [each.elements for each in plan.network.block if each.weight[0]] * model.num_layers
    return [*tables, *blocks]


def _sub_groups(plan: Plan) -> list[int]:
    size = int(plan.knobs["sub_group_size"])
    whole, rest = divmod(plan.share, size)
    return [size] * whole + ([rest] if rest else [])


def _power_of_two(num_bytes: float) -> float:
    size = 1
    while size < num_bytes:
        size *= 2
    return float(size)
