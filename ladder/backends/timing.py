"""The seconds of forward and backward, before calibration, which are the same for all backends."""

from __future__ import annotations

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


def token_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed, kernels: float) -> float:
    """Seconds of a token's computing on one rank, with kernels that take `kernels` times as long as the usual ones."""
    computing = flops_per_token(workload) + candidate.checkpointed * forward_flops(workload)
    beside = _adapter_traffic(workload) * workload.model.num_layers / (_ELEMENT_WISE * machine.device_bytes)
    return computing / (machine.flops * machine.achievable) * kernels + beside


def ramp_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed, per_token: float) -> float:
    """Seconds of a micro-step that do not depend on its tokens, where computing takes `per_token` seconds a token."""
    return _RAMP_TOKENS * machine.flops / 1e15 * per_token + _dequantise_seconds(workload, candidate, machine)


def launch_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed) -> float:
    """Seconds in which Python launches the kernels of forward and backward."""
    kernels = (1 + candidate.checkpointed / 3) * (1 + _KERNELS_OF_AN_ADAPTER * len(workload.weights.adapted))
    return machine.launch_seconds * workload.model.num_layers * kernels


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
