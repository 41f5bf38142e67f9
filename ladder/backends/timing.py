"""The seconds of forward and backward, before calibration, which are the same for all backends."""

from __future__ import annotations

from ladder.candidates import Candidate, Terms
from ladder.machine.machine_speed import MachineSpeed, attention_flops, flops_per_token, forward_flops
from ladder.step.counted import usual_block
from ladder.workload.trained import BYTES_OF_A_WEIGHT
from ladder.workload.workload import Workload

_LAUNCHED_AGAIN = 0.8
"""Launching a block's kernels for its second forward pass, with what checkpointing does, over launching a Llama block
forward and backward. Measured: 2.1 to 2.8 ms with opt-125m and Llama-3.2-1B on H200, where the CPU sets the pace."""
_RAMP_TOKENS = 200.0
"""The start and the end of kernels cost as much as this many tokens, on a GPU with 1e15 operations/s. Chosen."""
ELEMENT_WISE = 0.7
"""The share of the memory bandwidth that element-wise kernels reach. Chosen: as usual on data-centre GPUs."""
_ALIGNED, _UNALIGNED = 8, 3.5
"""Products with the head take so many times as long where the vocabulary is no multiple of 8 tokens, with which bf16
kernels load 16 bytes at once. Measured: chosen so that GPT-2 (50,257 tokens) and RoBERTa (50,265) on one H100 agree
(benchmarks/results/runs)."""
_WITH_A_MASK = 6.0
"""Attention with a mask takes so many times as long as causal attention without one: it computes twice as much, in
slower kernels. Measured: chosen between Falcon-RW-1B and Gemma-3-270m on one H200 (benchmarks/results/runs)."""
_OF_A_CHUNK = 6.0
"""Bytes per weight of the head that a chunk of the loss reads and writes. Measured: a chunk of 64 rows takes 1.4 ms on
one H100, with the 256,000 tokens of Gemma (benchmarks/results/runs)."""
_KERNELS_OF_AN_ADAPTER = 0.08
"""Kernels of an adapter, forward and backward, over those of a whole block. Derived: 10 of about 125."""
_LAUNCHES_OF_EXPERTS = 2.4
"""Launching a block with experts over launching a Llama block. Measured on one H200: 5.9 ms for Qwen3-MoE with one
sequence, where the other took 2.3 ms; chosen a little lower, since Qwen3's norms are part of that."""
_PRODUCTS_OF_EXPERTS = 1.33
"""Seconds of products of which most are experts', over the usual. Measured: 1.3 to 1.4 with a mixture of experts of 3B
on one H200, at micro-batches of 4 and 8; its small products, and routing, keep the GPU from its usual speed."""


def token_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed, terms: Terms) -> float:
    """Seconds of a token's computing on one rank: matrix products, and kernels that wait for the GPU's memory."""
    computing = flops_per_token(workload) + candidate.checkpointed * forward_flops(workload)
    moved = _traffic(workload, candidate, terms) + _adapter_traffic(workload) * workload.model.num_layers
    products = computing / _products(workload, machine) * terms.compute
    products *= _PRODUCTS_OF_EXPERTS if workload.model.num_experts > 1 else 1.0
    if workload.model.vocab_size % _ALIGNED:
        products += (_UNALIGNED - 1) * _head_flops(workload) / _products(workload, machine)
    products += _slow_product_seconds(workload, machine) * (1 + candidate.checkpointed / 3)
    return products + moved / (ELEMENT_WISE * machine.device_bytes)


def _products(workload: Workload, machine: MachineSpeed) -> float:
    """Operations a second of the matrix products of training; in fp32 without TF32, as torch has it by default."""
    return (machine.flops_32 if workload.dtype == "fp32" else machine.flops) * machine.achievable


def optimizer_products(workload: Workload, machine: MachineSpeed) -> float:
    """Seconds of the matrix products in an optimizer's step, as Muon's, of all weights on one rank."""
    counted = workload.script.facts.counted if workload.script else None
    return counted.products * workload.weights.trained / _products(workload, machine) if counted else 0.0


def _slow_product_seconds(workload: Workload, machine: MachineSpeed) -> float:
    """Seconds of a token by which a counted model's products take longer than in 16 bits and without masks."""
    model, block, products = workload.model, usual_block(workload.model), _products(workload, machine)
    in_32_bits = block.flops_32 + block.flops_32_by_length * workload.seq_len
    longer = in_32_bits * (1 / (machine.flops_32 * machine.achievable) - 1 / products)
    masked = (_WITH_A_MASK - 1) * attention_flops(block.masked, workload.seq_len)
    return model.num_layers * (longer + masked / products)


def ramp_seconds(
    workload: Workload, candidate: Candidate, machine: MachineSpeed, terms: Terms, per_token: float
) -> float:
    """Seconds of a micro-step that do not depend on its tokens, where computing takes `per_token` seconds a token."""
    of_kernels = _RAMP_TOKENS * machine.flops / 1e15 * per_token
    return of_kernels + _dequantise_seconds(workload, candidate, machine) + _chunk_seconds(workload, machine, terms)


def launch_seconds(workload: Workload, candidate: Candidate, machine: MachineSpeed, terms: Terms) -> float:
    """Seconds in which Python launches the kernels of forward and backward."""
    kernels = terms.launches + _LAUNCHED_AGAIN * candidate.checkpointed
    kernels *= 1 + _KERNELS_OF_AN_ADAPTER * len(workload.weights.adapted)
    kernels *= _LAUNCHES_OF_EXPERTS if workload.model.num_experts > 1 else 1.0
    return machine.launch_seconds * workload.model.num_layers * kernels


def _chunk_seconds(workload: Workload, machine: MachineSpeed, terms: Terms) -> float:
    """Seconds by which a chunked loss takes longer than its products, where a chunk is too short for them.

    Each chunk reads and writes the head's whole weight and its gradient, however few its tokens.
    """
    if not terms.chunks:
        return 0.0
    model, trains = workload.model, workload.weights.trains_head
    moved = (_OF_A_CHUNK if trains else _OF_A_CHUNK / 2) * workload.width / 2 * model.vocab_size * model.hidden_size
    computing = terms.tokens / terms.chunks * _head_flops(workload) / _products(workload, machine)
    return terms.chunks * max(0.0, moved / (ELEMENT_WISE * machine.device_bytes) - computing)


def _head_flops(workload: Workload) -> float:
    """Operations of the head's products, forward and backward, per token."""
    return (6.0 if workload.weights.trains_head else 4.0) * workload.model.vocab_size * workload.model.hidden_size


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
    return workload.width / 2 * (22.0 * outputs + (22.0 if lora.dropout > 0 else 12.0) * inputs)
