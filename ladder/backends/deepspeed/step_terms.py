"""The seconds of a step's parts with DeepSpeed, before calibration.

Each is a quantity divided by a speed: operations by FLOP/s, bytes by bytes/s. Constants called "measured" are fits to
tests/data: a Llama-2-7B shape on four H200.
"""

from __future__ import annotations

from ladder.backends.activations import offloaded_input, terms_of
from ladder.backends.base import StepTerms
from ladder.backends.deepspeed.config import engine_knobs
from ladder.candidates import Candidate
from ladder.machine.machine_speed import MachineSpeed, flops_per_token, forward_flops
from ladder.workload.trained import BYTES_OF_A_WEIGHT
from ladder.workload.workload import Workload

_RAMP_TOKENS = 200.0
"""The start and the end of kernels cost as much as this many tokens, on a GPU with 1e15 operations/s. Chosen."""
_ELEMENT_WISE = 0.7
"""The share of the memory bandwidth that element-wise kernels reach. Chosen: as usual on data-centre GPUs."""
_KERNELS_OF_AN_ADAPTER = 0.08
"""Kernels of an adapter, forward and backward, over those of a whole block. Derived: 10 of about 125."""
_HOOKS_OF_AN_ADAPTER = 0.17
"""Stage 3's work for an adapter's modules over that for a whole block. Measured: with seven adapters a block, steps of
Llama-3.2-1B that wait for it took 2.2 times as long."""
_LAUNCH_SECONDS = 0.003
"""Launching a block's kernels for forward and backward from Python. Measured: 0.0044 to 0.0051 s with 16 cores of a
shared host for an H200. Chosen: a dedicated host is up to three times as fast."""


def step_terms(workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
    """The parts of a step of `candidate`, with P parameters, T of them trained, and N ranks.

    Compute is `flops_per_token`; checkpointed layers run forward twice. Quantised weights are written in 16 bits in
    each pass. Only trained parameters are reduced and updated; all are gathered. A collective over N
    ranks moves (N − 1)/N of its bytes over each link, an all-reduce twice as much. Stage 2 all-reduces its buckets in
    every micro-step, stages 0 and 1 in the last one; stage 3 gathers parameters in forward and in backward, and
    scatters gradients. Optimizer offload copies 2 P/N bytes of gradients to the host: at stage 2 in every micro-step
    and back again, at stage 1 in the last one. Parameter offload copies 2 P/N bytes to the GPU for each gathering,
    without those that stay live.
    """
    model, rung = workload.model, candidate.engine.rung
    weights = workload.weights
    p, share = weights.total, weights.trained / world_size
    known = terms_of(workload, candidate, world_size)
    knobs = engine_knobs(workload, candidate.engine)
    over_links = 2.0 * (world_size - 1) / world_size / machine.link_bytes
    transfer = over_links * weights.trained
    reduce = once = gather = 0.0
    if rung.stage < 2:
        once = 2 * transfer
    if rung.stage == 2:
        reduce = 2 * transfer
    if rung.stage in (1, 2):
        once += transfer
    if rung.stage < 3 and rung.offload_optimizer != "none":
        down = 2 * share / machine.pcie_bytes
        reduce, once = (reduce, once + down) if rung.stage == 1 else (reduce + 2 * down, once)
    if rung.stage == 3:
        reduce = 2 * transfer
        # With checkpointing, the second forward pass gathers parameters again unless they stayed live.
        transfers, hooks = 2.0 + 0.5 * candidate.checkpointed, 0.8 + 0.2 * candidate.checkpointed
        hooks *= 1 + _HOOKS_OF_AN_ADAPTER * len(weights.adapted)
        gather = max(transfers * over_links * p, hooks * machine.host_seconds * model.num_layers)
    if rung.offload_param != "none":
        bus = machine.pcie_bytes if rung.offload_param == "cpu" else machine.nvme_bytes / world_size
        gather += 2 * 2 * (p / world_size) * max(0.0, 1 - knobs["stage3_max_live_parameters"] / p) / bus
    token_seconds = _token_seconds(workload, candidate, machine, known.compute)
    return StepTerms(
        compute=known.tokens * workload.usual_share * token_seconds,
        ramp=_RAMP_TOKENS * machine.flops / 1e15 * token_seconds + _dequantise_seconds(workload, candidate, machine),
        launch=_launch_seconds(workload, candidate) + _hook_seconds(workload, candidate),
        reduce=reduce,
        gather=gather,
        exchange=known.exchange / machine.link_bytes,
        doubts=known.doubts,
        inputs=2 * model.num_layers * offloaded_input(workload, candidate, world_size) / machine.pcie_bytes,
        hidden=(0.7 if rung.stage < 3 else 0.4) if knobs.get("overlap_comm") else 0.0,
        update=once + _update_seconds(candidate, share, world_size, machine, known.update_traffic),
    )


def _token_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed, kernels: float) -> float:
    """Seconds of a token's computing on one rank, with kernels that take `kernels` times as long as the usual ones."""
    computing = flops_per_token(workload) + candidate.checkpointed * forward_flops(workload)
    beside = _adapter_traffic(workload) * workload.model.num_layers / (_ELEMENT_WISE * machine.device_bytes)
    return computing / (machine.flops * machine.achievable) * kernels + beside


def _launch_seconds(workload: Workload, candidate: Candidate) -> float:
    kernels = (1 + candidate.checkpointed / 3) * (1 + _KERNELS_OF_AN_ADAPTER * len(workload.weights.adapted))
    return _LAUNCH_SECONDS * workload.model.num_layers * kernels


def _dequantise_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed) -> float:
    """Seconds of a micro-step to write quantised weights in 16 bits, once in each pass: with any micro-batch."""
    if workload.load_in is None:
        return 0.0
    moved = (BYTES_OF_A_WEIGHT[workload.load_in] + 2.0) * workload.weights.quantised
    return (2 + candidate.checkpointed) * moved / (_ELEMENT_WISE * machine.device_bytes)


def _adapter_traffic(workload: Workload) -> float:
    """Bytes per token that a block's adapters read and write besides their matrices' products.

    Derived from peft's passes, 2 bytes a value. Per output: B writes its own, which is scaled and added to the layer's
    (14 bytes); backward scales the gradient and reads it for B and for A's output (8). Per input: A reads it, also for
    its own gradient, and its share of the input's gradient is written and added (12); dropout reads and writes its own
    copy (10). Confirmed on one H200, where forward took 28 ms more than a plain one and 27 were derived.
    """
    lora = workload.lora
    if lora is None:
        return 0.0
    outputs = sum(matrix.outputs for matrix in workload.weights.adapted)
    inputs = sum(matrix.inputs for matrix in workload.weights.adapted)
    return 22.0 * outputs + (22.0 if lora.dropout > 0 else 12.0) * inputs


def _update_seconds(
    candidate: Candidate, share: float, world_size: int, machine: MachineSpeed, traffic: float
) -> float:
    """Seconds of the optimizer, and of copying updated parameters to their device.

    On the GPU it reads and writes `traffic` bytes per parameter. NVMe moves 30 bytes per parameter (derived: states,
    master weights and gradients are read, states and master weights written). Measured: if only parameters are
    offloaded, their update reaches the host at a fiftieth of the bus's speed.
    """
    rung, back = candidate.engine.rung, 2 * share / machine.pcie_bytes
    if rung.offload_optimizer == "none":
        owned = share if rung.stage > 0 else share * world_size
        return traffic * owned / machine.device_bytes + (50 * back if rung.offload_param == "cpu" else 0.0)
    if rung.offload_optimizer == "cpu":
        return share * world_size / machine.cpu_adam_parameters + back
    return 30 * share * world_size / machine.nvme_bytes + back


_HOOK_OF_A_GRADIENT = 0.25e-3
"""Host work of stage 2 for each gradient in each micro-step, beyond that of stages 0 and 1. Measured: 0.4 ms with
Llama-3.2-1B on a shared host (benchmarks/results/sweeps); chosen for a dedicated one, as launching kernels is."""


def _hook_seconds(workload: Workload, candidate: Candidate) -> float:
    """Seconds of the host for the gradients of adapters, two for each layer that has one, at stage 2."""
    if candidate.engine.rung.stage != 2:
        return 0.0
    return _HOOK_OF_A_GRADIENT * 2 * len(workload.weights.adapted) * workload.model.num_layers
