"""The memory of activations that the forward pass of a micro-batch saves for backward, and of the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ladder.backends.base import Device
from ladder.candidates import Candidate, Terms
from ladder.workload.modules import Module
from ladder.workload.workload import CountedBlock, ModelShape, Workload

_OF_A_LOGIT, _OF_A_NARROW_LOGIT = 12.0, 6.0
"""Bytes of logits and loss in 32 bits, see `activations_of`, and in 16. Derived: logits, log-softmax and gradient.
Measured with RoBERTa on one H100: 5.6 (benchmarks/results/runs)."""
_MOVED_BY_LOSS, _MOVED_BY_A_NARROW_LOSS = 48.0, 20.0
"""Bytes that the loss reads and writes for each logit. Derived: the fp32 copy, the log-softmax and its gradient;
without the copy, and in 16 bits."""
_MOVED_FOR_A_BIAS = 25.0
"""Attention with a bias that is trained takes longer: for each score, as long as moving so many bytes. Measured: chosen
between T0-3B on one H100 and FLAN-T5-base on one H200 (benchmarks/results/runs)."""
_SCORES_AT_ONCE = 3.0
"""Tensors of attention's scores that backward of a block has beside what was kept, where they are made at all.
Measured: 2.8 to 3.5 with Llama-3.2-1B in fp32 on one H200."""
_WIDE_BIAS = 2.0
"""Bytes that such a score keeps more under autocast, which casts the bias for each sequence. Measured: FLAN-T5-base
with DDP on one H200 (benchmarks/results/runs)."""
_OF_A_DROPPED_SCORE = 12.0
"""Bytes that a CPU keeps of such a score. Derived: the softmax, what is drawn and what is left of it, in 32 bits (torch
2.13, `_scaled_dot_product_attention_math`). Measured with GPT-SW3: 11 to 13, and 6 under autocast."""
_LAUNCHES_BESIDE, _LAUNCHES_OF_A_KERNEL = 0.49, 0.0048
"""Host work of a block over that for a Llama block: of its modules, and for each of its kernels. Measured: 1.8 to 2.3
ms in a micro-step of opt-125m and OPT-1.3B, whose blocks have 44 kernels, on H100 and H200, and 2.9 ms of Llama-3.2-1B
with 107 (benchmarks/results/runs and sweeps)."""
_LAUNCHES_FROM_PYTHON = 0.16
"""The same for a kernel that Python starts. Measured: 5.1 to 6.6 ms a block of Llama-3.2-1B with Liger's eight on H100
and H200 (benchmarks/results/runs and sweeps)."""
_USUAL_KERNELS, _USUAL_MOVED = 107.0, 10.0
"""Of a block whose code cannot be run without values, its kernels, and the bytes moved for each byte kept. Derived:
those of a Llama block."""


@dataclass(frozen=True)
class Activations:
    """Bytes that one rank's micro-batch saves for backward."""

    kept: float
    """Of all blocks: everything that they save, but only the inputs of checkpointed blocks."""
    block: float
    """Of one block while it is recomputed, with checkpointing."""
    freed: float
    """The share of `kept` that backward frees block by block, not counting inputs of checkpointed blocks."""
    tail: float
    """Of the final norm, between the blocks and the logits."""
    logits: float
    """Of logits and loss."""


def activations_of(
    workload: Workload, candidate: Candidate, world_size: int = 1, device: Device = "cuda"
) -> Activations:
    """What the forward pass saves, counted from transformers' modules in 16 bits with SDPA; confirmed within 2 %.
    In fp32 it is twice that, and attention's scores where no fused kernel takes the heads; confirmed within 2 %.

    Logits take 12.0 to 13.1 bytes each (measured): the fp32 log-softmax, its gradient and that of the fp32 logits; the
    16-bit logits are freed by then. (18 bytes are published for older code.) Techniques change these numbers in their
    own modules.
    """
    model, terms = workload.model, terms_of(workload, candidate, world_size, device)
    tokens, h = terms.tokens, model.hidden_size
    kept = candidate.checkpointed * workload.width * h + (1 - candidate.checkpointed) * terms.kept
    again = terms.kept + workload.width * model.intermediate_size * model.experts_of_a_token + terms.passing
    scores = _scores_in_32_bits(model, usual_block(model), device) if workload.dtype == "fp32" else 0.0
    passing = _SCORES_AT_ONCE * scores * workload.seq_len
    # With offloaded inputs, only one at a time is on the GPU.
    layers = 1.0 if candidate.offload_activations else workload.weights.reached_blocks * model.num_layers
    fixed = layers * (1 - candidate.checkpointed) * terms.fixed
    unforgotten = workload.weights.reached_blocks * model.num_layers * candidate.checkpointed * terms.unforgotten
    return Activations(
        kept=float(tokens * (layers * kept + unforgotten) + fixed),
        freed=1 - candidate.checkpointed,
        block=float(tokens * (again + passing) + terms.fixed) if candidate.gradient_checkpointing else tokens * passing,
        tail=float(tokens * terms.tail * h),
        logits=float(terms.loss),
    )


def logits_of(workload: Workload, candidate: Candidate, world_size: int) -> float:
    """Logits that a micro-step of a rank has at once."""
    of_one = _OF_A_LOGIT if has_wide_loss(workload) else _OF_A_NARROW_LOGIT
    return terms_of(workload, candidate, world_size).loss / of_one


def terms_of(workload: Workload, candidate: Candidate, world_size: int, device: Device = "cuda") -> Terms:
    """The coefficients of the usual kernels, changed by the candidate's techniques and by what is frozen.

    Frozen weights change what is kept, and not what is moved.
    """
    model = workload.model
    tokens, techniques = tokens_of_a_rank(workload, candidate, world_size), candidate.engine.techniques
    block = next((own for each in techniques if (own := each.block_of(model))), None) or usual_block(model)
    block = in_32_bits(model, block, device) if workload.dtype == "fp32" else block
    block = _on_a_cpu(block) if device == "cpu" else block
    wide = has_wide_loss(workload)
    kept_wide, by_length = block.kept_wide, block.kept_wide_by_length + _WIDE_BIAS * block.biased_by_length
    if workload.prepare_kbit:
        kept_wide, by_length = block.kept_beside_packed, block.kept_beside_packed_by_length
    terms = Terms(
        tokens=tokens,
        kept=block.kept + block.kept_by_length * workload.seq_len,
        kept_wide=kept_wide + by_length * workload.seq_len,
        traffic=block.moved + (block.moved_by_length + _MOVED_FOR_A_BIAS * block.biased_by_length) * workload.seq_len,
        tail=8,
        loss=tokens * model.vocab_size * (_OF_A_LOGIT if wide else _OF_A_NARROW_LOGIT),
        moved_by_loss=_MOVED_BY_LOSS if wide else _MOVED_BY_A_NARROW_LOSS,
        states=workload.state_bytes(),
        fp32_gradient=0.0 if workload.dtype == "fp32" else 4.0,
        launches=_launches(model, block, workload.seq_len),
    )
    for technique in techniques:
        terms = technique.costs(terms, workload, candidate, world_size)
    return terms if workload.weights.is_whole else _of_frozen_blocks(terms, workload, block)


def _on_a_cpu(block: CountedBlock) -> CountedBlock:
    """`block` where attention that drops scores is computed step by step, which keeps them."""
    return replace(block, kept_by_length=block.kept_by_length + _OF_A_DROPPED_SCORE * block.dropped_by_length)


def _launches(model: ModelShape, block: CountedBlock, length: int) -> float:
    """Host work of a block over that for a Llama block; what experts add, `launch_seconds` knows."""
    own = _LAUNCHES_FROM_PYTHON * block.from_python
    kernels = _USUAL_KERNELS if model.num_experts > 1 and not own else block.kernels - block.from_python
    kernels += block.kernels_by_length * length
    return _LAUNCHES_BESIDE + _LAUNCHES_OF_A_KERNEL * kernels + own


def has_wide_loss(workload: Workload) -> bool:
    """Whether the loss is computed in 32 bits."""
    return workload.model.has_wide_loss or workload.dtype == "fp32"


def in_32_bits(model: ModelShape, block: CountedBlock, device: Device) -> CountedBlock:
    """What `block` does in fp32, where a value takes twice the bytes that it was counted with, but for a state's."""
    return replace(
        block,
        kept=block.kept_in_32_bits or 2 * block.kept,
        kept_by_length=2 * block.kept_by_length + _scores_in_32_bits(model, block, device),
        kept_for_weights=2 * block.kept_for_weights,
        moved=2 * block.moved,
        moved_by_length=2 * block.moved_by_length,
    )


def _scores_in_32_bits(model: ModelShape, block: CountedBlock, device: Device) -> float:
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
        kernels=_USUAL_KERNELS,
        tensors=sum(each.layer is not None for each in model.modules) / model.num_layers,
        kept_wide=kept + 10.0 * h,
        kept_beside_packed=kept - 8.0 * h + 4.0 * net,
    )


def _of_frozen_blocks(terms: Terms, workload: Workload, block: CountedBlock) -> Terms:
    """`terms` where blocks, or a share of them, are not trained; derived from autograd, and confirmed on the CPU.

    What only gradients of a block's own weights need was counted. An adapter needs what its layer reads, once for all
    that read it, unless that is kept anyway; it saves what it passes from A to B, 2 r; its dropout a mask and a copy, 3
    bytes per input, after which the input itself is not needed; DoRA the layer's output twice. Under autocast each has
    a copy of its input for itself. Experts with adapters save their changed weights, and what goes into them. Blocks
    before the first that trains anything save nothing. A layer in 8 bits keeps its input for nothing, in an attribute
    of its operation (bitsandbytes 0.50, `MatMul8bitLt`), where checkpointing does not see it.
    """
    weights, lora = workload.weights, workload.lora
    frozen = 1 - weights.trained_blocks / (weights.reached_blocks or 1)
    with_dropout = lora is not None and lora.dropout > 0
    reading = () if with_dropout else weights.adapted
    held = {each.reads: each for each in weights.packed} if workload.load_in == "8bit" else {}
    width = workload.width
    shared = {each.reads: _input_bytes(each, width) for each in (*reading, *held.values()) if not each.is_kept}
    # Autocast gives attention's output 16 bits in any case.
    held_wide = {
        reads: _input_bytes(each) * (2 if workload.prepare_kbit and reads != "q" else 1) for reads, each in held.items()
    }
    own = sum(shared.values())
    own_wide = sum(_input_bytes(each, width) for each in reading)
    own_wide += sum(held_wide[each.reads] for each in held.values() if not each.is_kept)
    if lora is not None:
        of_adapters = width * lora.rank * len(weights.adapted)
        of_adapters += (1.0 + width) * sum(each.inputs for each in weights.adapted) if with_dropout else 0.0
        of_adapters += 2.0 * width * sum(each.outputs for each in weights.adapted) if lora.dora else 0.0
        own, own_wide = own + of_adapters, own_wide + of_adapters
    changed = [each for each in weights.adapted if each.kind == "experts"]
    kept_wide = terms.kept_wide + own_wide  # counted with frozen weights
    if not workload.prepare_kbit:  # beside adapters, frozen weights are in 16 bits
        kept_wide = (terms.kept if lora is not None else terms.kept_wide) + own_wide - frozen * block.kept_for_weights
    return replace(
        terms,
        kept=terms.kept + own - frozen * block.kept_for_weights,
        kept_wide=kept_wide,
        tail=terms.tail - (0.0 if weights.trains_head else 4.0),
        fixed=width * sum(each.size for each in changed),
        unforgotten=sum(_input_bytes(each) for each in held.values()),
        unforgotten_wide=sum(held_wide.values()),
    )


def _input_bytes(module: Module, width: float = 2.0) -> float:
    """Bytes of a token that a module reads, in values of `width` bytes; all of its experts together."""
    return width * module.inputs * (module.count * module.share if module.kind == "experts" else 1.0)


def offloaded_input(workload: Workload, candidate: Candidate, world_size: int) -> float:
    """Bytes of a layer's input that one rank offloads to the host; 0 without offloaded activations."""
    if not candidate.offload_activations:
        return 0.0
    return workload.width * tokens_of_a_rank(workload, candidate, world_size) * workload.model.hidden_size


def tokens_of_a_rank(workload: Workload, candidate: Candidate, world_size: int) -> int:
    """Tokens of a micro-step on one of `world_size` ranks, which may share sequences."""
    return candidate.micro_batch * workload.sample_len // candidate.engine.ranks_of_a_sequence(world_size)
