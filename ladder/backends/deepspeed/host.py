"""The host memory of DeepSpeed's engines. Names are those of DeepSpeed 0.19.8, runtime/zero."""

from __future__ import annotations

from collections.abc import Iterator

from ladder.step.assignment import Assignment
from ladder.step.host import parameters_of

_SWAP_BUFFERS, _PARAMETER_BUFFERS = 4, 5
"""Defined as `buffer_count` in the offload sections of the emitted configuration."""


def pinned_by_deepspeed(step: Assignment) -> Iterator[float]:
    """Bytes of each buffer in page-locked memory."""
    share, width = step.share, step.width
    if step.candidate.offload_activations:
        for layer, block in enumerate(step.network.blocks):
            if step.recomputes(layer) and block.reached:
                yield step.offloaded_input
    if step.optimizer_device == "cpu" and step.stage < 3:
        yield step.master_bytes * share  # single_partition_of_fp32_groups
        yield max(4.0, step.copied_gradient_bytes) * share  # its .grad
        yield width * share  # param_buffer_of_bit16_for_cpu_offload_groups
        yield width * step.network.largest_gradient  # temp_grad_buffer_for_cpu_offload
        if step.stage == 2 and step.accumulates:
            yield from (width * elements for elements in _own_parameters(step))  # accumulated_grads_in_cpu
    elif step.optimizer_device == "cpu":
        yield from (4.0 * elements for elements in _sub_groups(step))  # fp32_partitioned_groups_flat[i].grad
        yield width * share  # grad_partitions_flat_buffer
    elif step.optimizer_device == "nvme":
        yield from [4.0 * max(_sub_groups(step))] * _SWAP_BUFFERS
        yield width * share
    if step.parameter_device == "cpu":
        yield from (width * elements / step.ranks for elements in parameters_of(step))  # where zero.Init made them
        yield width * share  # param_groups_fp16_flat_cpu_memory, of those that the optimizer gets
    elif step.parameter_device == "nvme":
        yield from [width * max(step.network.table, step.network.head) / step.ranks] * _PARAMETER_BUFFERS


def _own_parameters(step: Assignment) -> list[int]:
    """Elements of the trained matrices that belong to one rank, with `round_robin_gradients`."""
    network = step.network
    outside = [network.trained_table, 0 if step.workload.model.tied else network.trained_head]
    products = [each for block in network.blocks for each in block.operations if each.weight[0] and each.trained]
    return [*(size for size in outside if size), *(each.elements for each in products)][:: step.ranks]


def _sub_groups(step: Assignment) -> list[int]:
    size = int(step.knobs["sub_group_size"])
    whole, rest = divmod(step.share, size)
    return [size] * whole + ([rest] if rest else [])
