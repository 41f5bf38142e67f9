"""The seconds of a step's parts without DeepSpeed, before calibration. Of FSDP2, not compared with GPUs."""

from __future__ import annotations

from ladder.backends.activations import terms_of
from ladder.backends.base import StepTerms
from ladder.backends.plain.moments import weights_bytes
from ladder.backends.timing import launch_seconds, ramp_seconds, token_seconds
from ladder.candidates import Candidate
from ladder.machine.machine_speed import MachineSpeed
from ladder.workload.workload import Workload

_LAUNCHES = 0.6
"""Seconds for launching a block's kernels over those under DeepSpeed, whose hooks run for each parameter. Measured: on
two H200, opt-125m takes 0.54 of the time with DDP."""
_OF_UPDATE = 28.0
"""Bytes per parameter that fused AdamW in fp32 reads and writes, with the gradient norm. Derived: weight, gradient and
two moments are read, three of them written."""
_HOOKS = 0.3
"""FSDP2's work for a layer over that of stage 3. Chosen: it works by layers, not by parameters."""


def plain_terms(workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
    """The parts of a step, with P parameters, T of them trained, and N ranks.

    DDP all-reduces fp32 gradients in the last micro-step, beside its backward. FSDP2 gathers 16-bit parameters in
    forward, and in backward if it reshards, and scatters 16-bit gradients in the last micro-step. With offload,
    parameters cross the bus for each gathering, gradients once, and Adam runs on the CPU. Where the ranks of a node
    divide everything among themselves, each then averages its part of the gradients with those of other nodes.
    """
    rung, weights, model = candidate.engine.rung, workload.weights, workload.model
    known = terms_of(workload, candidate, world_size)
    owners = known.owners or world_size
    over_links = (owners - 1) / owners / (machine.node_link_bytes if known.owners else machine.link_bytes)
    scattered = (4.0 if rung.stage == 0 else 2.0) * weights.trained * over_links
    scattered += 2.0 * 2.0 * weights.trained * (1 / owners - 1 / world_size) / machine.link_bytes
    gather = 0.0
    if rung.stage > 0:
        passes = 2.0 if rung.stage == 3 else 1.0
        gather = max(weights.bytes_held * over_links * passes, _HOOKS * machine.host_seconds * model.num_layers)
    share = weights.trained / (owners if rung.stage > 0 else 1)
    update = _OF_UPDATE * share / machine.device_bytes
    if rung.offload_param == "cpu":
        gather += 2 * weights_bytes(workload) / world_size / machine.pcie_bytes
        update = weights.trained / machine.cpu_adam_parameters + 4.0 * share / machine.pcie_bytes
    per_token = token_seconds(workload, candidate, machine, known)
    return StepTerms(
        compute=known.tokens * workload.usual_share * per_token,
        ramp=ramp_seconds(workload, candidate, machine, per_token),
        launch=_LAUNCHES * launch_seconds(workload, candidate, machine),
        reduce=0.0,
        gather=gather,
        exchange=0.0,
        doubts=known.doubts,
        inputs=0.0,
        hidden=0.0,
        # Two thirds of the reduction overlap with backward.
        update=update + (2 if rung.stage == 0 else 1) * scattered / 3,
    )
