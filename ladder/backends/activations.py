"""What the forward pass of a micro-batch keeps for backward, and what the loss takes."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.candidates import Candidate, Terms
from ladder.workload.workload import ModelShape, Workload

_NORMS_OF_QUERIES_AND_KEYS = {"qwen3": 6}
_PLAIN_NORMS = {"opt": 10}
"""Bytes of each hidden value, where they are not those of other families: see `activations_of`."""
_ACTIVATIONS = {"opt": "relu", "gpt2": "gelu_new"}
"""What transformers takes where a configuration names none."""
_BYTES_BY_ACTIVATION = {"relu": 2, "gelu_new": 9}
"""ReLU saves its output, which the next product keeps anyway; `gelu_new` is arithmetic in Python, term by term."""


@dataclass(frozen=True)
class Activations:
    """Bytes that one rank's micro-batch keeps for backward, by where they belong."""

    kept: float
    """All blocks: everything they saved, but of those checkpointed only their inputs."""
    block: float
    """One block recomputed, when checkpointing."""
    freed: float
    """The share of `kept` that backward gives back block by block; inputs of checkpointed blocks hardly count."""
    tail: float
    """The final norm's, between the blocks and the logits."""
    logits: float


def activations_of(workload: Workload, candidate: Candidate, world_size: int = 1) -> Activations:
    """What the forward pass keeps, derived from transformers' modules in 16 bits with SDPA; confirmed within 2 %.

    A token of a Llama block: two RMSNorms keep the input in fp32, the normalised and the scaled output in 16 bits
    (2 · 8 h), attention its queries and output (4 h) and keys and values (2 · 2 kv), the gated feed-forward net four
    widths (8 f): 24 h + 8 f with as many key-value as query heads, measured 0.383e9 bytes against 0.382e9. A plain
    net keeps two widths, a LayerNorm input and output. Logits, measured 12.0–13.1 bytes each: the fp32 log-softmax, its
    gradient, and that of the fp32 logits; the 16-bit logits are gone by then. (18 are published for older code.)
    OPT's norms keep their input and output (8 h), its dropout two masks of a byte. Qwen3 norms its queries and keys,
    too. Of experts, those count that a token meets. What a technique changes stands in its own module.
    """
    model, terms = workload.model, terms_of(workload, candidate, world_size)
    tokens, h = terms.tokens, model.hidden_size
    block = terms.norms * h + terms.attention + terms.net * model.intermediate_size * _experts_of_a_token(model)
    if model.is_encoder_decoder:
        # Half the blocks attend twice; T5 adds position biases, so the scores themselves are kept.
        block += terms.attention // 2 + 4 * h + 6 * model.num_heads * workload.seq_len
    kept = candidate.checkpointed * 2 * h + (1 - candidate.checkpointed) * block
    again = block + 2 * model.intermediate_size + terms.passing
    # Where inputs wait on the host, one of them is on the GPU, on its way or in use.
    layers = 1 if candidate.offload_activations else model.num_layers
    return Activations(
        kept=float(tokens * layers * kept),
        freed=1 - candidate.checkpointed,
        block=float(tokens * again) if candidate.gradient_checkpointing else 0.0,
        tail=float(tokens * terms.tail * h),
        logits=float(terms.loss),
    )


def terms_of(workload: Workload, candidate: Candidate, world_size: int) -> Terms:
    """The coefficients of the usual kernels, as the candidate's techniques change them."""
    model = workload.model
    tokens = tokens_of_a_rank(workload, candidate, world_size)
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 4 * queries + 4 * keys + _NORMS_OF_QUERIES_AND_KEYS.get(model.model_type, 0) * (queries + keys)
    terms = Terms(
        tokens=tokens,
        norms=16 if model.gated_mlp else _PLAIN_NORMS.get(model.model_type, 12),
        attention=attention,
        net=8 if model.gated_mlp else _plain_net_bytes(model),
        tail=8,
        loss=float(tokens * 12 * model.vocab_size),
    )
    for technique in candidate.engine.techniques:
        terms = technique.costs(terms, workload, candidate, world_size)
    return terms


def offloaded_input(workload: Workload, candidate: Candidate, world_size: int) -> float:
    """Bytes of a layer's input on its way from one rank to the host, in 16 bits; 0 where it stays on the GPU."""
    if not candidate.offload_activations:
        return 0.0
    return 2.0 * tokens_of_a_rank(workload, candidate, world_size) * workload.model.hidden_size


def tokens_of_a_rank(workload: Workload, candidate: Candidate, world_size: int) -> int:
    """Tokens of a micro-step on one of `world_size` ranks, which may share each sequence."""
    return candidate.micro_batch * workload.sample_len // candidate.engine.ranks_of_a_sequence(world_size)


def _plain_net_bytes(model: ModelShape) -> int:
    """Of each hidden value of a net without a gate: GELU keeps its input and output, and so on."""
    activation = model.config.get("activation_function", _ACTIVATIONS.get(model.model_type))
    return _BYTES_BY_ACTIVATION.get(str(activation), 4)


def _experts_of_a_token(model: ModelShape) -> int:
    active = model.config.get("num_experts_per_tok")
    return active if isinstance(active, int) and active > 0 else 1
