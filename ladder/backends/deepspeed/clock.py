"""The seconds of a step's parts with DeepSpeed.

Each is a quantity divided by a speed: operations by FLOP/s, bytes by bytes/s. Constants called "measured" without a
source are fits to tests/data: a Llama-2-7B shape on four H200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.machine.machine_speed import MachineSpeed
from ladder.step.clock import StepParts
from ladder.step.computing import Computing
from ladder.step.counted import usual_block
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.backends.deepspeed.step import Zero

_HOOKS_OF_AN_ADAPTER = 0.19
"""Stage 3's work for an adapter's modules over that for a whole block. Measured: with seven adapters a block, steps of
Llama-3.2-1B that wait for it took 2.2 times as long."""
_HOOKS_AGAIN = 0.2
"""Stage 3's work for a block's second forward pass with checkpointing, over that for the block otherwise. Measured: 0.1
to 0.5 with Llama-3.2-1B and OPT-1.3B on H200, where nothing is offloaded (benchmarks/results/sweeps)."""
_HOOKS_OF_A_FETCH = 0.15
"""Stage 3's work to fetch a block's parameters from the host, over that for the block otherwise. Measured: with
Llama-3.2-1B and OPT-1.3B it takes 1.1 times as long if few are fetched, and 1.3 to 1.6 times if each pass does."""
_HOOK_OF_A_GRADIENT = 0.17e-3
"""Host work of stage 2 for each gradient in each micro-step, beyond that of stages 0 and 1. Measured: 0.1 to 0.25 ms
with all weights of opt-125m, OPT-1.3B and Llama-3.2-1B (benchmarks/results/against-plain), and 0.4 ms with adapters on
a shared host (benchmarks/results/sweeps)."""
_CROSSING_OF_A_GRADIENT = 0.2e-3
"""The same at stages 2 and 3 for each gradient that is copied to the host. Measured: 0.1 to 0.3 ms with opt-125m on two
H100 and OPT-1.3B on two H200 (benchmarks/results/runs and sweeps)."""
_STEP_OF_A_TENSOR = 0.27e-3
"""Host work of an optimizer step for each tensor that is trained: norm, flattening, copies. Measured: 0.13 to 0.36 ms
with adapters of ranks 8 to 256 of three families at stage 0 (benchmarks/results/1xh200-adapters), and 0.26 to 0.28 ms
with all weights of opt-125m, OPT-1.3B and Llama-3.2-1B (benchmarks/results/against-plain)."""
_UPDATED, _UPDATED_ON_NVME = 44.0, 30.0
"""Bytes per parameter that an optimizer step reads and writes: on the GPU beside the states, with master weights of 32
bits and gradients in 16 and 32 bits, and the gradient norm; and on a drive, where states, master weights and gradients
are read, states and master weights written. Derived."""
_BACK_TO_THE_HOST = 50.0
"""Seconds in which the update of parameters that alone are offloaded reaches the host, over those of a pinned copy.
Measured."""
_HIDDEN, _HIDDEN_AT_STAGE_3 = 0.7, 0.4
"""The share of a reduction that overlaps with backward, where DeepSpeed is told to. Measured."""


def zero_time(step: Zero, machine: MachineSpeed) -> StepParts:
    """The parts of a step with P parameters, T of them trained, and N ranks.

    Compute is `flops_per_token`; checkpointed layers run forward twice. Quantised weights are written in 16 bits in
    each pass. Only trained parameters are reduced and updated; all are gathered. A collective over N ranks moves (N −
    1)/N of its bytes over each link, an all-reduce twice as much. Stage 2 all-reduces its buckets in every micro-step,
    stages 0 and 1 in the last one; stage 3 gathers parameters in forward and in backward, and scatters gradients; a
    technique may let the ranks of a node gather among themselves. Optimizer offload copies 2 P/N bytes of gradients to
    the host: at stages 2 and 3, whose buffers lie there (DeepSpeed 0.19.8), in each micro-step and back again, at stage
    1 in the last one. Parameter offload copies 2 P/N bytes to the GPU for each gathering, without those that stay live.
    """
    computing, weights, stage = Computing(step, machine), step.workload.weights, step.stage
    transfer = _over_links(step, machine) * weights.trained
    reduce = 2 * transfer if stage > 1 else 0.0
    once = {0: 2 * transfer, 1: 3 * transfer, 2: transfer, 3: 0.0}[stage]
    if step.optimizer_device != "none":
        down = step.width * weights.trained / step.ranks / machine.pcie_bytes
        reduce, once = (reduce, once + down) if stage == 1 else (reduce + 2 * down, once)
    per_token = computing.of_a_token()
    return StepParts(
        compute=computing.of_tokens(per_token),
        ramp=computing.ramp(per_token),
        launch=computing.launch() + _hooks(step, machine),
        reduce=reduce,
        gather=_gathering(step, machine),
        exchange=_exchanged(step) / machine.link_bytes,
        inputs=2 * step.workload.model.num_layers * step.offloaded_input / machine.pcie_bytes,
        hidden=(_HIDDEN if stage < 3 else _HIDDEN_AT_STAGE_3) if step.knobs.get("overlap_comm") else 0.0,
        update=once + _update(step, machine) + (computing.of_update() if step.optimizer_device == "none" else 0.0),
    )


def _over_links(step: Zero, machine: MachineSpeed) -> float:
    """Seconds for a parameter in a collective of all ranks."""
    return step.width * (step.ranks - 1) / step.ranks / machine.link_bytes


def _gathering(step: Zero, machine: MachineSpeed) -> float:
    """Seconds of stage 3 to gather parameters from all ranks, and to fetch those that are offloaded.

    With checkpointing, the second forward pass gathers parameters again unless they stayed live. With copies in each
    node, only the first forward pass of a step gathers from other nodes.
    """
    if step.stage < 3:
        return 0.0
    p, group = step.workload.weights.total, step.group
    passes = 2.0 + 0.5 * step.candidate.checkpointed
    of_one = _over_links(step, machine)
    if step.effects.copied_in_node:
        across = 1 / (step.candidate.accumulation * passes)
        within = step.width * (group - 1) / group / machine.node_link_bytes
        of_one = across * of_one + (1 - across) * within
    seconds = passes * of_one * p
    if step.parameter_device != "none":
        bus = machine.pcie_bytes if step.parameter_device == "cpu" else machine.nvme_bytes / step.ranks
        seconds += step.width * (p / step.ranks) * _fetches(step) / bus
    return seconds


def _fetches(step: Zero) -> float:
    """How often a micro-step fetches an offloaded parameter.

    In forward and in backward, without those that stay live. Without a reuse distance none stays, and the second
    forward pass of checkpointing fetches again (DeepSpeed's coordinator, tests/process/test_gathering.py).
    """
    if not step.knobs["stage3_max_reuse_distance"]:
        return 2.0 + step.candidate.checkpointed
    return 2.0 * max(0.0, 1 - step.knobs["stage3_max_live_parameters"] / step.workload.weights.total)


def _exchanged(step: Zero) -> float:
    """Bytes that sequence parallelism sends in a micro-step: queries, keys, values and attention's output, in each
    pass."""
    if not step.effects.shares_sequence:
        return 0.0
    model = step.workload.model
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    passes = 2.0 + step.candidate.checkpointed
    return passes * model.num_layers * step.tokens * step.width * heads * (step.ranks - 1) / step.ranks


def _update(step: Zero, machine: MachineSpeed) -> float:
    """Seconds of the optimizer, and of copying updated parameters to their device."""
    trained = step.workload.weights.trained
    share = trained / step.ranks
    back = step.width * share / machine.pcie_bytes
    hooks = _STEP_OF_A_TENSOR * step.effects.tensor_step * _num_trained(step.workload)
    if step.optimizer_device == "cpu":
        return hooks + trained / machine.cpu_adam_parameters + back
    if step.optimizer_device == "nvme":
        return hooks + _UPDATED_ON_NVME * trained / machine.nvme_bytes + back
    owned = share if step.stage > 0 else trained
    moved = _UPDATED * step.effects.master_bytes / 4 + 2 * step.state_bytes
    return (
        hooks
        + moved * owned / machine.device_bytes
        + (_BACK_TO_THE_HOST * back if step.parameter_device == "cpu" else 0.0)
    )


def _hooks(step: Zero, machine: MachineSpeed) -> float:
    """Seconds of the host besides launching kernels: for gradients from stage 2 on, and for the modules of stage 3."""
    if step.stage < 2:
        return 0.0
    workload, again = step.workload, step.candidate.checkpointed
    num_trained = _num_trained(workload)
    crossing = 0.0 if step.optimizer_device == "none" else _CROSSING_OF_A_GRADIENT * num_trained
    if step.stage == 2:
        return crossing + _HOOK_OF_A_GRADIENT * num_trained
    of_block = machine.host_seconds * (1 + _HOOKS_OF_AN_ADAPTER * len(workload.weights.adapted))
    if step.parameter_device != "none":
        of_block *= 1 + _HOOKS_OF_A_FETCH * _fetches(step)
    return crossing + of_block * workload.model.num_layers * (1 + _HOOKS_AGAIN * again)


def _num_trained(workload: Workload) -> float:
    """Tensors that are trained, without those outside the blocks; of adapters, two for each layer that has one."""
    whole = workload.weights.trained_blocks * workload.model.num_layers * usual_block(workload.model).tensors
    return whole + 2 * len(workload.weights.adapted) * workload.model.num_layers
