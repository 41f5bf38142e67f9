"""What a block of a model was counted to do, in the precision of a training and with the techniques of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from ladder.candidates import Technique
from ladder.workload.workload import CountedBlock, ModelShape, Workload

Device = Literal["cuda", "cpu"]
SCORES_AT_ONCE = 3.0
"""Tensors of attention's scores that backward of a block has beside what was kept, where they are made at all.
Measured: 2.8 to 3.5 with Llama-3.2-1B in fp32 on one H200."""
USUAL_KERNELS, _USUAL_MOVED = 107.0, 10.0
"""Of a block whose code cannot be run without values, its kernels, and the bytes moved for each byte kept. Derived:
those of a Llama block."""
_WIDE_BIAS = 2.0
"""Bytes that such a score keeps more under autocast, which casts the bias for each sequence. Measured: FLAN-T5-base
with DDP on one H200 (benchmarks/results/runs)."""

_OF_A_DROPPED_SCORE, _UNDER_AUTOCAST = 12.0, 6.0
"""Bytes that a CPU keeps of such a score. Derived: the softmax, what is drawn and what is left of it, in 32 bits (torch
2.13, `_scaled_dot_product_attention_math`). Measured with GPT-SW3: 11 to 13, and 6 under autocast."""


def counted_block(workload: Workload, techniques: Iterable[Technique], device: Device) -> CountedBlock:
    """What a block does with the kernels of `techniques`, in the precision of `workload`."""
    model = workload.model
    block = next((own for each in techniques if (own := each.block_of(model))), None) or usual_block(model)
    block = _in_32_bits(model, block, device) if workload.dtype == "fp32" else block
    return _on_a_cpu(block) if device == "cpu" else block


def has_wide_loss(workload: Workload) -> bool:
    """Whether the loss is computed in 32 bits."""
    return workload.model.has_wide_loss or workload.dtype == "fp32"


def kept_under_autocast(workload: Workload, block: CountedBlock) -> float:
    """Bytes that a block keeps per token where trained weights have 32 bits, without what adapters add.

    0 if the same as without autocast: beside adapters, frozen weights are in 16 bits.
    """
    if workload.prepare_kbit:
        return block.kept_beside_packed + block.kept_beside_packed_by_length * workload.seq_len
    if workload.lora is not None:
        return 0.0
    by_length = block.kept_wide_by_length + _WIDE_BIAS * block.biased_by_length
    return block.kept_wide + by_length * workload.seq_len


def scores_in_32_bits(model: ModelShape, block: CountedBlock, device: Device) -> float:
    """Bytes of attention's scores for each token of the sequence, which are kept in fp32 where heads share keys.

    None of torch's fused kernels on GPUs takes such heads in fp32 (torch 2.11, SDPA with `enable_gqa`). Seen with
    Llama-3.2-1B on one H200. The one for CPUs takes them.
    """
    are_kept = device == "cuda" and model.num_kv_heads < model.num_heads and not block.masked
    return 4.0 * model.num_heads if are_kept else 0.0


def usual_block(model: ModelShape) -> CountedBlock:
    """What a block of `model` does, or a Llama block of its sizes where that could not be counted."""
    if model.block is not None:
        return model.block
    h, net = model.hidden_size, model.intermediate_size * model.experts_of_a_token
    kept = 16.0 * h + 4.0 * model.head_dim * (model.num_heads + model.num_kv_heads) + 8.0 * net
    return CountedBlock(
        kept=kept,
        kept_by_length=0.0,
        kept_for_weights=8.0 * h + 2.0 * net,
        moved=_USUAL_MOVED * kept,
        moved_by_length=0.0,
        kernels=USUAL_KERNELS,
        tensors=sum(each.layer is not None for each in model.modules) / model.num_layers,
        kept_wide=kept + 10.0 * h,
        kept_beside_packed=kept - 8.0 * h + 4.0 * net,
    )


def chunk_rows(tokens: int, model: ModelShape) -> int:
    """Tokens per chunk of a chunked loss (liger-kernel 0.8.5, ops/): as many logits as there are hidden values."""
    pieces = -(-model.vocab_size // model.hidden_size)
    return min(tokens, 1 << max(0, (-(-tokens // pieces) - 1).bit_length()))


def _on_a_cpu(block: CountedBlock) -> CountedBlock:
    """`block` where attention that drops scores is computed step by step, which keeps them."""
    scores = block.dropped_by_length
    return replace(
        block,
        kept_by_length=block.kept_by_length + _OF_A_DROPPED_SCORE * scores,
        kept_wide_by_length=block.kept_wide_by_length + _UNDER_AUTOCAST * scores,
    )


def _in_32_bits(model: ModelShape, block: CountedBlock, device: Device) -> CountedBlock:
    """What `block` does in fp32, where a value takes twice the bytes that it was counted with, but for a state's."""
    return replace(
        block,
        kept=block.kept_in_32_bits or 2 * block.kept,
        kept_by_length=2 * block.kept_by_length + scores_in_32_bits(model, block, device),
        kept_for_weights=2 * block.kept_for_weights,
        moved=2 * block.moved,
        moved_by_length=2 * block.moved_by_length,
    )
