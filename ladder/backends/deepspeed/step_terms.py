"""The seconds of a step's parts under DeepSpeed, before any correction.

Each is a quantity over a speed: operations over FLOP/s, bytes over bytes/s. What is called "measured" is a fit to
tests/data: a Llama-2-7B shape on four H200.
"""

from __future__ import annotations

from ladder.backends.activations import offloaded_input, terms_of
from ladder.backends.base import StepTerms
from ladder.backends.deepspeed.config import engine_knobs
from ladder.candidates import Candidate
from ladder.machine.machine_speed import MachineSpeed, flops_per_token
from ladder.workload.workload import Workload

_RAMP_TOKENS = 200.0
"""Tokens whose compute the start and the end of kernels cost, on a GPU of 1e15 operations a second (estimate)."""
_LAUNCH_SECONDS = 0.003
"""A block's kernels, forward and backward, started one by one from Python. Measured 0.0044 to 0.0051 where 16 cores of
a shared host feed an H200; a host of one's own is up to three times as fast (estimate)."""


def step_terms(workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
    """What the steps of `candidate` consist of, with P parameters and N ranks.

    Compute: `flops_per_token`, 4/3 of it in the layers with checkpointing, which run forward twice. A collective over N
    ranks moves (N − 1)/N of its bytes over each link, an all-reduce twice that. Stage 2 all-reduces its buckets in
    every micro-step, stages 0 and 1 at the boundary; stage 3 gathers in forward and in backward, and scatters
    gradients. Offload of the optimizer takes 2 P/N bytes of gradients down, at stage 2 in every micro-step and up
    again, at stage 1 at the boundary; offload of parameters brings 2 P/N up for each gathering, but for those that
    stay live.
    """
    model, rung = workload.model, candidate.engine.rung
    p, share = model.num_parameters, model.num_parameters / world_size
    known = terms_of(workload, candidate, world_size)
    knobs = engine_knobs(workload, candidate.engine)
    again = 1 + candidate.checkpointed / 3
    computing = flops_per_token(workload) * again
    transfer = 2.0 * p * (world_size - 1) / world_size / machine.link_bytes
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
        # With checkpointing, the second forward pass gathers again what has not stayed live.
        transfers, hooks = 2.0 + 0.5 * candidate.checkpointed, 0.8 + 0.2 * candidate.checkpointed
        gather = max(transfers * transfer, hooks * machine.host_seconds * model.num_layers)
    if rung.offload_param != "none":
        bus = machine.pcie_bytes if rung.offload_param == "cpu" else machine.nvme_bytes / world_size
        gather += 2 * 2 * share * max(0.0, 1 - knobs["stage3_max_live_parameters"] / p) / bus
    token_seconds = computing / (machine.flops * machine.achievable) * known.compute
    return StepTerms(
        compute=known.tokens * workload.usual_share * token_seconds,
        ramp=_RAMP_TOKENS * machine.flops / 1e15 * token_seconds,
        launch=_LAUNCH_SECONDS * model.num_layers * again,
        reduce=reduce,
        gather=gather,
        exchange=known.exchange / machine.link_bytes,
        doubts=known.doubts,
        inputs=2 * model.num_layers * offloaded_input(workload, candidate, world_size) / machine.pcie_bytes,
        hidden=(0.7 if rung.stage < 3 else 0.4) if knobs.get("overlap_comm") else 0.0,
        update=once + _update_seconds(candidate, share, world_size, machine, known.update_traffic),
    )


def _update_seconds(
    candidate: Candidate, share: float, world_size: int, machine: MachineSpeed, traffic: float
) -> float:
    """Seconds of the optimizer, and of moving what it updated to where the parameters live.

    On the GPU it reads and writes `traffic` bytes a parameter. NVMe moves 30 bytes a parameter (derived: states,
    master and gradients read, states and master written). Measured: where parameters alone are offloaded, their update
    reaches the host at a fiftieth of the bus's speed.
    """
    rung, back = candidate.engine.rung, 2 * share / machine.pcie_bytes
    if rung.offload_optimizer == "none":
        owned = share if rung.stage > 0 else share * world_size
        return traffic * owned / machine.device_bytes + (50 * back if rung.offload_param == "cpu" else 0.0)
    if rung.offload_optimizer == "cpu":
        return share * world_size / machine.cpu_adam_parameters + back
    return 30 * share * world_size / machine.nvme_bytes + back
