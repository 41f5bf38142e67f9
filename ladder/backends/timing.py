"""The seconds of forward and backward, before calibration, which are the same for all backends."""

from __future__ import annotations

from ladder.candidates import Candidate, Terms
from ladder.machine.machine_speed import MachineSpeed, flops_per_token, forward_flops
from ladder.workload.matrices import num_experts
from ladder.workload.trained import BYTES_OF_A_WEIGHT
from ladder.workload.workload import Workload

_RAMP_TOKENS = 200.0
"""The start and the end of kernels cost as much as this many tokens, on a GPU with 1e15 operations/s. Chosen."""
ELEMENT_WISE = 0.7
"""The share of the memory bandwidth that element-wise kernels reach. Chosen: as usual on data-centre GPUs."""
_KERNELS_OF_AN_ADAPTER = 0.08
"""Kernels of an adapter, forward and backward, over those of a whole block. Derived: 10 of about 125."""
_LAUNCHES_OF_EXPERTS = 2.2
"""Launching a block with experts over launching a Llama block. Measured on one H200: 5.9 ms for Qwen3-MoE with one
sequence, where the other took 2.3 ms; chosen a little lower, since Qwen3's norms are part of that."""


def token_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed, terms: Terms) -> float:
    """Seconds of a token's computing on one rank: matrix products, and kernels that wait for the GPU's memory."""
    computing = flops_per_token(workload) + candidate.checkpointed * forward_flops(workload)
    moved = _traffic(workload, candidate, terms) + _adapter_traffic(workload) * workload.model.num_layers
    products = computing / (machine.flops * machine.achievable) * terms.compute
    return products + moved / (ELEMENT_WISE * machine.device_bytes)


def ramp_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed, per_token: float) -> float:
    """Seconds of a micro-step that do not depend on its tokens, where computing takes `per_token` seconds a token."""
    return _RAMP_TOKENS * machine.flops / 1e15 * per_token + _dequantise_seconds(workload, candidate, machine)


def launch_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed) -> float:
    """Seconds in which Python launches the kernels of forward and backward."""
    kernels = (1 + candidate.checkpointed / 3) * (1 + _KERNELS_OF_AN_ADAPTER * len(workload.weights.adapted))
    kernels *= _LAUNCHES_OF_EXPERTS if num_experts(workload.model) > 1 else 1.0
    return machine.launch_seconds * workload.model.num_layers * kernels


def _dequantise_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed) -> float:
    """Seconds of a micro-step to write quantised weights in 16 bits, once in each pass: with any micro-batch."""
    if workload.load_in is None:
        return 0.0
    moved = (BYTES_OF_A_WEIGHT[workload.load_in] + 2.0) * workload.weights.quantised
    return (2 + candidate.checkpointed) * moved / (ELEMENT_WISE * machine.device_bytes)


def _traffic(workload: Workload, candidate: Candidate, terms: Terms) -> float:
    """Bytes per token that element-wise kernels read and write. Forward is a third, which checkpointing repeats."""
    of_blocks = terms.traffic * workload.model.num_layers * (1 + candidate.checkpointed / 3)
    return of_blocks + terms.moved_by_loss * workload.model.vocab_size


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
