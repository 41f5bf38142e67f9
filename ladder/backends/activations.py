"""The memory of activations that the forward pass of a micro-batch saves for backward, and of the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ladder.candidates import Candidate, Terms
from ladder.workload.matrices import experts_of_a_token, num_experts
from ladder.workload.workload import CountedBlock, ModelShape, Workload

_NORMS_OF_QUERIES_AND_KEYS = {"olmoe": 6, "qwen3": 6, "qwen3_moe": 6}
_NORMS = {"gemma": 20, "opt": 10, "bert": 10, "roberta": 10, "gpt2": 14, "t5": 22, "mt5": 22}
"""Bytes per hidden value that norms keep, with masks of dropout, for families that differ from the others (see
`activations_of`). Derived: counted from transformers' code (ladder/trial/count_block.py)."""
_NORMALISED = {"gemma": 8}
"""As `Terms.normalised`: Gemma multiplies with 1 + w in 32 bits."""
_WITH_A_BIAS = ("t5", "mt5")
"""Families whose attention adds a bias for each pair of positions."""
_NETS_OF_T5 = {"relu": 5, "gated-gelu": 15}
"""Bytes per intermediate value of T5's net, which has a dropout inside, by `feed_forward_proj`; 9 for other gates.
Derived: counted from transformers' code (ladder/trial/count_block.py)."""
_MOVED_FOR_A_BIAS = 38.0
"""Such attention takes longer: for each score, as long as moving so many bytes. Measured: chosen between T0-3B on one
H100 and FLAN-T5-base on one H200 (benchmarks/results/runs)."""
_ACTIVATIONS = {"opt": "relu", "gpt2": "gelu_new"}
"""transformers' defaults if a configuration names no activation."""
_BYTES_BY_ACTIVATION = {"relu": 2, "gelu_new": 9}
"""ReLU saves only its output, which the next product saves anyway; `gelu_new` is arithmetic in Python, term by term."""

_MOVED_IN_PYTHON, _MOVED_WITH_ROTARY, _MOVED_BY_KERNELS = 10.0, 7.0, 4.0
"""Bytes that a block's element-wise kernels move for each byte kept for backward: RMSNorm, rotary positions, gates and
`gelu_new` are several kernels each, LayerNorm and other activations one. Measured: fitted to the recorded micro-steps
of Llama, Qwen3 and OPT on H200 without offload, whose families then agree within 12 % (before: 20 %), and of
Pythia-410m and GPT-2 on one H100 (benchmarks/results/runs)."""
_WIDE_LOSSES = ("esmc", "eurobert", "modernbert")
"""Encoders whose loss is computed in 32 bits, as that of causal models; others compute it in 16 (transformers 5.23)."""
_OF_A_LOGIT, _OF_A_NARROW_LOGIT = 12.0, 6.0
"""Bytes of logits and loss in 32 bits, see `activations_of`, and in 16. Derived: logits, log-softmax and gradient.
Measured with RoBERTa on one H100: 5.6 (benchmarks/results/runs)."""
_MOVED_BY_LOSS, _MOVED_BY_A_NARROW_LOSS = 48.0, 20.0
"""Bytes that the loss reads and writes for each logit. Derived: the fp32 copy, the log-softmax and its gradient;
without the copy, and in 16 bits."""
_LAUNCHES_BESIDE, _LAUNCHES_OF_A_KERNEL = 0.49, 0.0048
"""Host work of a block over that for a Llama block: of its modules, and for each of its kernels where they were
counted. Derived from `_LAUNCHES_OF_FEWER` and the 44 kernels of an OPT block, 107 of a Llama block."""
_LAUNCHES_OF_FEWER = 0.7
"""Host work to launch the kernels of a block without gates, over that for a Llama block. Measured: 1.8 to 2.3 ms in a
micro-step of opt-125m and OPT-1.3B on H100 and H200, 2.9 ms of Llama-3.2-1B (benchmarks/results/runs and sweeps)."""


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


def activations_of(workload: Workload, candidate: Candidate, world_size: int = 1) -> Activations:
    """What the forward pass saves, derived from transformers' modules in 16 bits with SDPA; confirmed within 2 %.

    Per token of a Llama block: two RMSNorms save the input in fp32, and the normalised and the scaled output in 16 bits
    (2 · 8 h); attention saves queries and output (4 h) and keys and values (2 · 2 kv); the gated MLP saves four
    intermediate tensors (8 f). With as many key-value as query heads that is 24 h + 8 f: 0.383e9 bytes measured,
    0.382e9 predicted. An MLP without gate saves two intermediate tensors, a LayerNorm its input and output. Logits take
    12.0 to 13.1 bytes each (measured): the fp32 log-softmax, its gradient and that of the fp32 logits; the 16-bit
    logits are freed by then. (18 bytes are published for older code.) OPT's norms save input and output (8 h), and its
    dropout two masks of one byte. Qwen3 also has norms of queries and keys. Only the experts of a token count, each
    with a copy of its hidden values and one of what it makes of them (4 h). Techniques change these numbers in their
    own modules.
    """
    model, terms = workload.model, terms_of(workload, candidate, world_size)
    tokens, h = terms.tokens, model.hidden_size
    block = block_bytes(model, terms)
    if model.is_encoder_decoder:
        block += _cross_attention_bytes(workload, terms)
    kept = candidate.checkpointed * 2 * h + (1 - candidate.checkpointed) * block
    again = block + 2 * model.intermediate_size * experts_of_a_token(model) + terms.passing
    # With offloaded inputs, only one at a time is on the GPU.
    layers = 1.0 if candidate.offload_activations else workload.weights.reached_blocks * model.num_layers
    fixed = layers * (1 - candidate.checkpointed) * terms.fixed
    unforgotten = workload.weights.reached_blocks * model.num_layers * candidate.checkpointed * terms.unforgotten
    return Activations(
        kept=float(tokens * (layers * kept + unforgotten) + fixed),
        freed=1 - candidate.checkpointed,
        block=float(tokens * again + terms.fixed) if candidate.gradient_checkpointing else 0.0,
        tail=float(tokens * terms.tail * h),
        logits=float(terms.loss),
    )


def logits_of(workload: Workload, candidate: Candidate, world_size: int) -> float:
    """Logits that a micro-step of a rank has at once."""
    of_one = _OF_A_LOGIT if _has_wide_loss(workload) else _OF_A_NARROW_LOGIT
    return terms_of(workload, candidate, world_size).loss / of_one


def block_bytes(model: ModelShape, terms: Terms) -> float:
    """Bytes per token that one block saves for backward, but for an encoder's or a decoder's own."""
    net = terms.net * model.intermediate_size * experts_of_a_token(model)
    return terms.norms * model.hidden_size + terms.attention + net + terms.routed


def terms_of(workload: Workload, candidate: Candidate, world_size: int) -> Terms:
    """The coefficients of the usual kernels, changed by the candidate's techniques and by what is frozen.

    Frozen weights change what is kept, and not what is moved.
    """
    model = workload.model
    tokens = tokens_of_a_rank(workload, candidate, world_size)
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 4 * queries + 4 * keys + _NORMS_OF_QUERIES_AND_KEYS.get(model.model_type, 0) * (queries + keys)
    terms = Terms(
        tokens=tokens,
        norms=_NORMS.get(model.model_type, 16 if model.gated_mlp else 12),
        attention=attention,
        net=_net_bytes(model),
        routed=_routed_bytes(model),
        tail=8,
        loss=tokens * model.vocab_size * (_OF_A_LOGIT if _has_wide_loss(workload) else _OF_A_NARROW_LOGIT),
        normalised=_NORMALISED.get(model.model_type, 4 if model.gated_mlp else 0),
        moved=_moved_per_byte(model),
        moved_by_loss=_MOVED_BY_LOSS if _has_wide_loss(workload) else _MOVED_BY_A_NARROW_LOSS,
        launches=1.0 if model.gated_mlp else _LAUNCHES_OF_FEWER,
    )
    if model.block is not None:
        terms = _as_counted(terms, workload, model.block)
    for technique in candidate.engine.techniques:
        terms = technique.costs(terms, workload, candidate, world_size)
    own = _cross_attention_bytes(workload, terms) if model.is_encoder_decoder else 0.0
    traffic = terms.moved * (block_bytes(model, terms) + own)
    if model.model_type in _WITH_A_BIAS:
        traffic += _MOVED_FOR_A_BIAS * model.num_heads * workload.seq_len
    terms = replace(terms, traffic=traffic)
    return terms if workload.weights.is_whole else _of_frozen_blocks(terms, workload)


def _as_counted(terms: Terms, workload: Workload, block: CountedBlock) -> Terms:
    """`terms` of a model whose own code was counted. What formulas do not know of is taken for a part of attention."""
    kept = block.kept + block.kept_by_length * workload.seq_len
    moved = block.moved + block.moved_by_length * workload.seq_len
    launches = _LAUNCHES_BESIDE + _LAUNCHES_OF_A_KERNEL * block.kernels
    return replace(
        terms,
        attention=terms.attention + kept - block_bytes(workload.model, terms),
        moved=moved / kept,
        # With experts, `launch_seconds` knows better.
        launches=terms.launches if num_experts(workload.model) > 1 else launches,
    )


def _of_frozen_blocks(terms: Terms, workload: Workload) -> Terms:
    """`terms` where blocks, or a share of them, are not trained; derived from autograd, and confirmed on the CPU.

    A layer saves its input for the gradient of its weight alone. So a frozen linear layer saves nothing, unless it has
    an adapter, whose own weight needs that input: 2 h for the norm's output before attention, and before the net; 2 f
    inside the net, unless its activation saves its own output, as ReLU does. The output of attention is saved by SDPA
    anyway. A frozen RMSNorm does not save its normalised value, 2 h. An adapter saves what it passes from A to B, 2 r;
    its dropout a mask and a copy, 3 bytes per input, after which the input itself is not needed; DoRA the layer's
    output twice. Experts with adapters save their changed weights; without, not what goes into them (2 h). Blocks
    before the first that trains anything save nothing. Where a block was counted, so was what a frozen one keeps, and
    only adapters are derived. A layer in 8 bits keeps its input for nothing, in an attribute
    of its operation (bitsandbytes 0.50, `MatMul8bitLt`), where checkpointing does not see it.
    """
    weights = workload.weights
    lora = workload.lora
    with_dropout = lora is not None and lora.dropout > 0
    read = set() if with_dropout else {matrix.reads for matrix in weights.adapted}
    held_in_8_bits = {each.reads: each.inputs for each in weights.packed} if workload.load_in == "8bit" else {}
    read |= held_in_8_bits.keys()
    frozen = 1 - weights.trained_blocks / (weights.reached_blocks or 1)
    norms = sum(2.0 * (letter not in read) for letter in ("a", "n")) + terms.normalised
    own = 0.0
    if lora is not None:
        own += 2.0 * lora.rank * len(weights.adapted)
        own += 3.0 * sum(matrix.inputs for matrix in weights.adapted) if with_dropout else 0.0
        own += 4.0 * sum(matrix.outputs for matrix in weights.adapted) if lora.dora else 0.0
    model = workload.model
    saves_its_output = not model.gated_mlp and _activation(model) == "relu"
    has_norms = model.model_type in _NORMS_OF_QUERIES_AND_KEYS
    of_heads = 2.0 * model.head_dim * (model.num_heads + model.num_kv_heads) * has_norms
    tail = 0.0 if weights.trains_head else 2.0 + terms.normalised / 2
    terms = replace(terms, tail=terms.tail - tail, unforgotten=2.0 * sum(held_in_8_bits.values()))
    if model.block is not None and num_experts(model) == 1:
        needed = 2.0 * model.hidden_size * len({"a", "n"} & read)
        needed += 2.0 * model.intermediate_size * ("f" in read and not saves_its_output)
        return replace(terms, attention=terms.attention - frozen * (model.block.kept_for_weights - needed) + own)
    changed = [matrix for matrix in weights.adapted if matrix.kind == "experts"]
    into_experts = 2.0 * model.hidden_size * experts_of_a_token(model) if terms.routed and not changed else 0.0
    return replace(
        terms,
        norms=terms.norms - frozen * norms,
        attention=terms.attention - frozen * of_heads + own,
        net=(terms.net - frozen * 2.0 * ("f" not in read and not saves_its_output)),
        routed=terms.routed - frozen * into_experts,
        fixed=2.0 * sum(matrix.elements for matrix in changed),
    )


def offloaded_input(workload: Workload, candidate: Candidate, world_size: int) -> float:
    """Bytes of a layer's 16-bit input that one rank offloads to the host; 0 without offloaded activations."""
    if not candidate.offload_activations:
        return 0.0
    return 2.0 * tokens_of_a_rank(workload, candidate, world_size) * workload.model.hidden_size


def tokens_of_a_rank(workload: Workload, candidate: Candidate, world_size: int) -> int:
    """Tokens of a micro-step on one of `world_size` ranks, which may share sequences."""
    return candidate.micro_batch * workload.sample_len // candidate.engine.ranks_of_a_sequence(world_size)


def _cross_attention_bytes(workload: Workload, terms: Terms) -> float:
    """Bytes per token that a block keeps more, in the mean: half of the blocks have a second attention, with a norm and
    a dropout of its own."""
    model = workload.model
    if model.block is not None:  # counted as the mean of all blocks
        return 0.0
    return terms.attention / 2 + 5.5 * model.hidden_size


def _has_wide_loss(workload: Workload) -> bool:
    return workload.task == "causal-lm" or workload.model.model_type in _WIDE_LOSSES


def _moved_per_byte(model: ModelShape) -> float:
    if model.gated_mlp or _activation(model) == "gelu_new":
        return _MOVED_IN_PYTHON
    return _MOVED_WITH_ROTARY if model.model_type == "gpt_neox" else _MOVED_BY_KERNELS


def _net_bytes(model: ModelShape) -> int:
    """Bytes per intermediate value of a feed-forward net, which depends on its activation."""
    if model.model_type in _WITH_A_BIAS:
        usual = "relu" if model.model_type == "t5" else "gated-gelu"
        return _NETS_OF_T5.get(str(model.config.get("feed_forward_proj", usual)), 9)
    return 8 if model.gated_mlp else _BYTES_BY_ACTIVATION.get(_activation(model), 4)


def _activation(model: ModelShape) -> str:
    usual = model.config.get("hidden_act", _ACTIVATIONS.get(model.model_type))
    return str(model.config.get("activation_function", usual))


def _routed_bytes(model: ModelShape) -> float:
    """Bytes per token that a block's routing saves: a token's copies for its experts, and theirs, with five indices.

    Counted on the CPU, where transformers sends tokens to experts in groups as on a GPU.
    """
    return (4.0 * model.hidden_size + 40.0) * experts_of_a_token(model) if num_experts(model) > 1 else 0.0
