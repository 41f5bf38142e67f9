"""The seconds of a step's parts without DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.machine.machine_speed import MachineSpeed
from ladder.step.clock import StepParts
from ladder.step.computing import ELEMENT_WISE, Computing

if TYPE_CHECKING:
    from ladder.backends.plain.step import Wrapped

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
_EXPOSED = 1 / 3
"""The share of the reduction in the last micro-step that does not overlap with backward. Chosen."""


def wrapped_time(step: Wrapped, machine: MachineSpeed) -> StepParts:
    """The parts of a step with P parameters, T of them trained, and N ranks.

    DDP all-reduces fp32 gradients in the last micro-step, beside its backward; 16-bit ones of a script's 16-bit
    weights. FSDP2 gathers 16-bit parameters in forward, and in backward if it reshards, and scatters 16-bit gradients
    in the last micro-step. With offload, parameters cross the bus for each gathering, gradients once, and Adam runs on
    the CPU. Where the ranks of a node divide everything among themselves, each then averages its part of the gradients
    with those of other nodes. Where gradients are divided in every micro-step, each scatters them.
    """
    workload, weights, model = step.workload, step.workload.weights, step.workload.model
    computing, owners = Computing(step, machine), step.owners
    link = machine.node_link_bytes if step.effects.divided_in_node else machine.link_bytes
    over_links = (owners - 1) / owners / link
    scattered = (4.0 if step.autocasts else workload.width) * weights.trained * over_links
    scattered += 2.0 * workload.width * weights.trained * (1 / owners - 1 / step.ranks) / machine.link_bytes
    gather = weights.bytes_held * over_links * step.passes
    share = weights.trained / (owners if step.stage > 0 else 1)
    update = (_OF_UPDATE * step.stored_width + 2 * step.state_bytes) * share / machine.device_bytes
    update += computing.of_update()
    if step.parameter_device == "cpu":
        gather += 2 * step.stored / step.ranks / machine.pcie_bytes
        update = weights.trained / machine.cpu_adam_parameters + 4.0 * share / machine.pcie_bytes
    per_token = computing.of_a_token(_TRAFFIC_IN_FP32 if step.autocasts else 1.0)
    if step.autocasts and model.num_experts > 1:
        per_token *= _IN_FP32
    launch = computing.launch() * (_CASTS if step.autocasts else 1.0)
    if step.stage > 0:
        launch += _HOOKS * machine.host_seconds * model.num_layers * (1 + step.candidate.checkpointed / 3)
    each_time = step.effects.divides_gradients
    return StepParts(
        compute=computing.of_tokens(per_token),
        ramp=computing.ramp(per_token),
        launch=launch,
        reduce=scattered if each_time else 0.0,
        hidden=1 - _EXPOSED,
        handling=_handled_bytes(step, computing.chunks) / (ELEMENT_WISE * machine.device_bytes),
        gather=gather,
        update=update + (0 if each_time else 2 if step.stage == 0 else 1) * scattered * _EXPOSED,
    )


def _handled_bytes(step: Wrapped, chunks: int) -> float:
    """Bytes that a rank reads and writes in each micro-step for weights and their gradients, with any batch.

    Autocast casts all trained weights, and for a fused loss the head's with each of its `chunks`. FSDP2 casts a rank's
    own part, and copies what it gathers. Both add up gradients, of all weights or, if divided, of a rank's own part.
    """
    workload, weights, model = step.workload, step.workload.weights, step.workload.model
    if step.autocasts:
        chunked = chunks * _OF_A_CHUNK * model.vocab_size * model.hidden_size if weights.trains_head else 0.0
        return (_OF_A_CAST + _OF_A_SUM_IN_FP32) * weights.trained + chunked
    summed = _OF_A_SUM * workload.width / 2 * weights.trained
    summed /= step.owners if step.effects.divides_gradients else 1
    cast = 0.0 if workload.dtype == "fp32" else _OF_A_CAST * weights.trained / step.owners
    return summed + step.passes * (cast + _OF_A_COPY * weights.bytes_held / 2)
