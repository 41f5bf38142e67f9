"""The seconds of a step's parts without DeepSpeed, before calibration."""

from __future__ import annotations

from dataclasses import replace

from ladder.backends.base import StepTerms
from ladder.backends.plain.step import Wrapped, weights_bytes
from ladder.backends.terms import terms_of
from ladder.backends.timing import ELEMENT_WISE, launch_seconds, optimizer_products, ramp_seconds, token_seconds
from ladder.candidates import Candidate, Terms
from ladder.machine.machine_speed import MachineSpeed
from ladder.workload.workload import Workload

_CASTS = 1.4
"""Launching a block's kernels under autocast over launching them with 16-bit weights: each product casts its weight,
bias and input. Measured: 1.2 to 1.5 with opt-125m on one H200, where the CPU sets the pace."""
_HOOKS = 0.28
"""FSDP2's own work for a layer over that of stage 3. Measured: 1.6 to 4.4 ms a layer beyond launching its kernels, with
opt-125m and OPT-1.3B on one H200, and with Llama-3.2-1B and Llama-2-7B on two H100 (benchmarks/results/runs)."""
_TRAFFIC_IN_FP32 = 1.5
"""Bytes that element-wise kernels move under autocast, which keeps norms and the sums of blocks in 32 bits, over those
with 16-bit weights. Measured: with Pythia-410m on one H100 and Llama-3.2-1B on two, whose micro-steps take 6 to 18 %
longer (benchmarks/results/runs)."""
_IN_FP32 = 2.6
"""Seconds of experts under autocast over those with 16-bit weights: transformers' grouped product is none of the
operations that autocast casts, so it computes in fp32. Measured with a mixture of experts of 3B on one H200."""
_OF_UPDATE = 3.0
"""How often an optimizer step reads or writes what a weight takes, beside the states, which it reads and writes.
Derived: weight and gradient are read, the weight is written."""
_OF_A_CAST, _OF_A_COPY = 6.0, 4.0
"""Bytes per parameter to read in 32 bits and write in 16, and to copy what was gathered in 16 bits to its place.
Derived."""
_OF_A_SUM, _OF_A_SUM_IN_FP32 = 6.0, 18.0
"""Bytes per parameter to add a 16-bit gradient to a sum of 16 bits, or of 32. Derived: the latter first writes the
gradient in fp32."""
_OF_A_CHUNK = 10.0
"""Bytes per weight of the head in fp32, for each chunk of a fused loss, more than with 16-bit weights. Derived: the
weight is cast, and the sum of its gradients read and written in fp32."""


def plain_terms(workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
    """The parts of a step, with P parameters, T of them trained, and N ranks.

    DDP all-reduces fp32 gradients in the last micro-step, beside its backward; 16-bit ones of a script's 16-bit
    weights. FSDP2 gathers 16-bit parameters in forward, and in backward if it reshards, and scatters 16-bit gradients
    in the last micro-step. With offload, parameters cross the bus for each gathering, gradients once, and Adam runs on
    the CPU. Where the ranks of a node divide everything among themselves, each then averages its part of the gradients
    with those of other nodes. Where gradients are divided in every micro-step, each scatters them.
    """
    rung, weights, model = candidate.engine.rung, workload.weights, workload.model
    known, narrow = terms_of(workload, candidate, world_size), rung.stage == 0 and workload.trains_16_bits
    autocasts = rung.stage == 0 and not narrow and workload.dtype != "fp32"
    if autocasts:
        known = replace(known, traffic=_TRAFFIC_IN_FP32 * known.traffic)
    owners = known.owners or world_size
    over_links = (owners - 1) / owners / (machine.node_link_bytes if known.owners else machine.link_bytes)
    scattered = (4.0 if autocasts else workload.width) * weights.trained * over_links
    scattered += 2.0 * workload.width * weights.trained * (1 / owners - 1 / world_size) / machine.link_bytes
    passes = {0: 0.0, 2: 1.0, 3: 2.0}[rung.stage]
    gather = weights.bytes_held * over_links * passes
    share = weights.trained / (owners if rung.stage > 0 else 1)
    held = 2.0 if narrow else 4.0
    update = (_OF_UPDATE * held + 2 * workload.state_bytes(held)) * share / machine.device_bytes
    update += optimizer_products(workload, machine)
    if rung.offload_param == "cpu":
        gather += 2 * weights_bytes(workload) / world_size / machine.pcie_bytes
        update = weights.trained / machine.cpu_adam_parameters + 4.0 * share / machine.pcie_bytes
    per_token = token_seconds(workload, candidate, machine, known)
    if autocasts and model.num_experts > 1:
        per_token *= _IN_FP32
    launch = launch_seconds(workload, candidate, machine, known)
    each_time = Wrapped(workload, candidate, world_size).effects.divides_gradients
    handled = _handled_bytes(workload, known, passes, owners, owners if each_time else 1)
    hooks = _HOOKS * machine.host_seconds * model.num_layers * (1 + candidate.checkpointed / 3)
    return StepTerms(
        compute=known.tokens * workload.usual_share * per_token,
        ramp=ramp_seconds(workload, candidate, machine, known, per_token),
        launch=_CASTS * launch if autocasts else launch if rung.stage == 0 else launch + hooks,
        reduce=scattered if each_time else 0.0,
        handling=handled / (ELEMENT_WISE * machine.device_bytes),
        gather=gather,
        exchange=0.0,
        doubts=known.doubts,
        inputs=0.0,
        # Two thirds of the reduction overlap with backward.
        hidden=2 / 3,
        update=update + (0 if each_time else 2 if rung.stage == 0 else 1) * scattered / 3,
    )


def _handled_bytes(workload: Workload, known: Terms, passes: float, owners: int, parts: int) -> float:
    """Bytes that a rank reads and writes in each micro-step for weights and their gradients, with any batch.

    Autocast casts all trained weights, and for a fused loss the head's with each chunk. FSDP2 casts a rank's own part,
    and copies what it gathers. Both add up gradients, of all weights or, with FSDP2, of one of so many `parts`.
    """
    weights, model, of_sum = workload.weights, workload.model, _OF_A_SUM * workload.width / 2
    if passes:
        casts = 0.0 if workload.dtype == "fp32" else _OF_A_CAST * weights.trained / owners
        return of_sum * weights.trained / parts + passes * (casts + _OF_A_COPY * weights.bytes_held / 2)
    if workload.trains_16_bits or workload.dtype == "fp32":
        return of_sum * weights.trained
    chunks = known.chunks if weights.trains_head else 0
    of_all = (_OF_A_CAST + _OF_A_SUM_IN_FP32) * weights.trained
    return of_all + chunks * _OF_A_CHUNK * model.vocab_size * model.hidden_size
