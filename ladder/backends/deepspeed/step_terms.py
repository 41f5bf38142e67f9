"""The seconds of a step's parts with DeepSpeed, before calibration.

Each is a quantity divided by a speed: operations by FLOP/s, bytes by bytes/s. Constants called "measured" are fits to
tests/data: a Llama-2-7B shape on four H200.
"""

from __future__ import annotations

from collections.abc import Mapping

from ladder.backends.base import StepTerms
from ladder.backends.deepspeed.config import engine_knobs
from ladder.backends.deepspeed.step import Zero
from ladder.backends.terms import terms_of
from ladder.backends.timing import launch_seconds, optimizer_products, ramp_seconds, token_seconds
from ladder.candidates import Candidate, Terms
from ladder.machine.machine_speed import MachineSpeed
from ladder.step.counted import usual_block
from ladder.workload.workload import Workload

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


def step_terms(workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
    """The parts of a step of `candidate`, with P parameters, T of them trained, and N ranks.

    Compute is `flops_per_token`; checkpointed layers run forward twice. Quantised weights are written in 16 bits in
    each pass. Only trained parameters are reduced and updated; all are gathered. A collective over N ranks moves (N −
    1)/N of its bytes over each link, an all-reduce twice as much. Stage 2 all-reduces its buckets in every micro-step,
    stages 0 and 1 in the last one; stage 3 gathers parameters in forward and in backward, and scatters gradients; a
    technique may let the ranks of a node gather among themselves. Optimizer offload copies 2 P/N bytes of gradients to
    the host: at stages 2 and 3, whose buffers lie there (DeepSpeed 0.19.8), in each micro-step and back again, at stage
    1 in the last one. Parameter offload copies 2 P/N bytes to the GPU for each gathering, without those that stay live.
    """
    model, rung = workload.model, candidate.engine.rung
    weights = workload.weights
    p, share = weights.total, weights.trained / world_size
    known = terms_of(workload, candidate, world_size)
    knobs = engine_knobs(workload, candidate.engine, world_size)
    width = workload.width
    over_links = width * (world_size - 1) / world_size / machine.link_bytes
    transfer = over_links * weights.trained
    reduce = once = gather = 0.0
    if rung.stage < 2:
        once = 2 * transfer
    if rung.stage == 2:
        reduce = 2 * transfer
    if rung.stage in (1, 2):
        once += transfer
    if rung.stage == 3:
        reduce = 2 * transfer
        # With checkpointing, the second forward pass gathers parameters again unless they stayed live.
        gather = (2.0 + 0.5 * candidate.checkpointed) * _gathered(known, machine, over_links, width) * p
    if rung.offload_optimizer != "none":
        down = width * share / machine.pcie_bytes
        reduce, once = (reduce, once + down) if rung.stage == 1 else (reduce + 2 * down, once)
    if rung.offload_param != "none":
        bus = machine.pcie_bytes if rung.offload_param == "cpu" else machine.nvme_bytes / world_size
        gather += width * (p / world_size) * _fetches(candidate, knobs, p) / bus
    per_token = token_seconds(workload, candidate, machine, known)
    return StepTerms(
        compute=known.tokens * workload.usual_share * per_token,
        ramp=ramp_seconds(workload, candidate, machine, known, per_token),
        launch=launch_seconds(workload, candidate, machine, known) + _hook_seconds(workload, candidate, machine, knobs),
        reduce=reduce,
        gather=gather,
        exchange=known.exchange / machine.link_bytes,
        doubts=known.doubts,
        inputs=2 * model.num_layers * Zero(workload, candidate, world_size).offloaded_input / machine.pcie_bytes,
        hidden=(0.7 if rung.stage < 3 else 0.4) if knobs.get("overlap_comm") else 0.0,
        update=once + _update_seconds(workload, candidate, world_size, machine, known),
    )


def _fetches(candidate: Candidate, knobs: Mapping[str, bool | int], p: float) -> float:
    """How often a micro-step fetches an offloaded parameter.

    In forward and in backward, without those that stay live. Without a reuse distance none stays, and the second
    forward pass of checkpointing fetches again (DeepSpeed's coordinator, tests/process/test_gathering.py).
    """
    if not knobs["stage3_max_reuse_distance"]:
        return 2.0 + candidate.checkpointed
    return 2.0 * max(0.0, 1 - knobs["stage3_max_live_parameters"] / p)


def _gathered(known: Terms, machine: MachineSpeed, over_links: float, width: float) -> float:
    """Seconds to gather a parameter: from all ranks, or for the rest from a group of them in the node."""
    within = width * (known.group - 1) / known.group / machine.node_link_bytes if known.group else 0.0
    return known.across * over_links + (1 - known.across) * within


def _update_seconds(
    workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed, terms: Terms
) -> float:
    """Seconds of the optimizer, and of copying updated parameters to their device.

    On the GPU it reads and writes `update_traffic` bytes per parameter, and the states. NVMe moves 30 bytes per
    parameter (derived: states, master weights and gradients are read, states and master weights written). Measured: if
    only parameters are offloaded, their update reaches the host at a fiftieth of the bus's speed.
    """
    rung, share = candidate.engine.rung, workload.weights.trained / world_size
    back, hooks = (
        workload.width * share / machine.pcie_bytes,
        _STEP_OF_A_TENSOR * terms.tensor_step * _num_trained(workload),
    )
    if rung.offload_optimizer == "none":
        owned = share if rung.stage > 0 else share * world_size
        update = (terms.update_traffic + 2 * terms.states) * owned / machine.device_bytes
        update += optimizer_products(workload, machine)
        return hooks + update + (50 * back if rung.offload_param == "cpu" else 0.0)
    if rung.offload_optimizer == "cpu":
        return hooks + share * world_size / machine.cpu_adam_parameters + back
    return hooks + 30 * share * world_size / machine.nvme_bytes + back


def _hook_seconds(
    workload: Workload, candidate: Candidate, machine: MachineSpeed, knobs: Mapping[str, bool | int]
) -> float:
    """Seconds of the host besides launching kernels: for gradients from stage 2 on, and for the modules of stage 3."""
    rung = candidate.engine.rung
    if rung.stage < 2:
        return 0.0
    num_trained = _num_trained(workload)
    crossing = 0.0 if rung.offload_optimizer == "none" else _CROSSING_OF_A_GRADIENT * num_trained
    if rung.stage == 2:
        return crossing + _HOOK_OF_A_GRADIENT * num_trained
    of_block = machine.host_seconds * (1 + _HOOKS_OF_AN_ADAPTER * len(workload.weights.adapted))
    if rung.offload_param != "none":
        of_block *= 1 + _HOOKS_OF_A_FETCH * _fetches(candidate, knobs, workload.weights.total)
    return crossing + of_block * workload.model.num_layers * (1 + _HOOKS_AGAIN * candidate.checkpointed)


def _num_trained(workload: Workload) -> float:
    """Tensors that are trained, without those outside the blocks."""
    whole = workload.weights.trained_blocks * workload.model.num_layers * usual_block(workload.model).tensors
    return whole + _num_adapters(workload)


def _num_adapters(workload: Workload) -> int:
    """Tensors of adapters: two for each layer that has one."""
    return 2 * len(workload.weights.adapted) * workload.model.num_layers
