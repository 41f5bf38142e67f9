"""The parameters of each model family: exact for families that we know, an estimate for other decoders.

The counts are those of transformers' classes with a language-model head; tests compare them on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ladder.workload.config_guard import ConfigReader, shorten

_TEXT_SECTION = "text_config"
"""Where a model of images and text has its language model's sizes."""


@dataclass(frozen=True)
class Block:
    """One kind of transformer block: how many there are, the elements of each weight matrix, biases and norms."""

    count: int
    matrices: list[int]
    others: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The tensors of a model, in elements, and the dimensions for its ModelShape."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int | None
    gated: bool
    blocks: list[Block]
    tables: list[int]
    """Embedding tables, in which tokens or positions are looked up."""
    head: int
    """The output matrix."""
    tied: bool
    fails_with_fsdp2: bool = False
    """As in ModelShape."""
    matrices: list[int] = field(default_factory=list)
    """Further matrices outside the blocks."""
    others: int = 0
    """Norms and biases outside the blocks."""
    fused: int = 0
    """The largest tensor if transformers may store several matrices as one, such as all experts."""
    estimated: bool = False
    section: str = ""
    """As in ModelShape."""


def _llama_like(config: ConfigReader) -> Parts:
    """llama, mistral, qwen2, qwen3 and gemma: RMSNorm, rotary positions, grouped heads, a gated feed-forward net."""
    family = str(config.config["model_type"])
    hidden = config.size("hidden_size")
    free_head_dim = family in ("mistral", "qwen3", "gemma")
    heads = config.size("num_attention_heads") if free_head_dim else config.heads(hidden, "num_attention_heads")
    # transformers' defaults for a missing key, which differ from those for a key that is null.
    absent = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma": 16}.get(family, heads)
    kv_heads = config.size("num_key_value_heads", default=heads if "num_key_value_heads" in config.config else absent)
    if heads % kv_heads:
        raise config.refuse(f"{kv_heads} key-value heads do not divide {heads} attention heads")
    default_dim = {"qwen3": 128, "gemma": 256}.get(family) if "head_dim" not in config.config else None
    head_dim = config.size("head_dim", default=default_dim or hidden // heads)
    intermediate, vocab = config.size("intermediate_size"), config.size("vocab_size")

    q, kv = heads * head_dim, kv_heads * head_dim
    biases = 0
    if family == "qwen2":
        biases += q + 2 * kv
    elif family in ("llama", "qwen3", "gemma") and config.flag("attention_bias", False):
        biases += q + 2 * kv + hidden
    if family == "llama" and config.flag("mlp_bias", False):
        biases += 2 * intermediate + hidden
    norms = 2 * hidden + (2 * head_dim if family == "qwen3" else 0)
    matrices = [hidden * q, hidden * kv, hidden * kv, q * hidden, *[hidden * intermediate] * 3]
    return Parts(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_positions=config.size("max_position_embeddings", default=0) or None,
        gated=True,
        blocks=[Block(config.layers("num_hidden_layers"), matrices, biases + norms)],
        tables=[vocab * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", family == "gemma"),
        others=hidden,
    )


def _opt(config: ConfigReader) -> Parts:
    hidden, ffn, vocab = config.size("hidden_size"), config.size("ffn_dim"), config.size("vocab_size")
    heads, positions = config.heads(hidden, "num_attention_heads"), config.size("max_position_embeddings")
    width = config.size("word_embed_proj_dim", default=hidden)
    norm = 2 * hidden if config.flag("layer_norm_elementwise_affine", True) else 0
    biases = 5 * hidden + ffn if config.flag("enable_bias", True) else 0
    final_norm = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)
    return Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        max_positions=positions,
        gated=False,
        blocks=[Block(config.layers("num_hidden_layers"), [*[hidden**2] * 4, *[hidden * ffn] * 2], biases + 2 * norm)],
        tables=[vocab * width, (positions + 2) * hidden],  # two rows of the position table are never used
        head=vocab * width,
        tied=config.flag("tie_word_embeddings", True),
        matrices=[width * hidden] * 2 if width != hidden else [],
        others=norm if final_norm else 0,
    )


def _t5(config: ConfigReader) -> Parts:
    hidden, inner_dim, ffn = config.size("d_model", "hidden_size"), config.size("d_kv"), config.size("d_ff")
    heads, vocab = config.size("num_heads"), config.size("vocab_size")
    encoders = config.layers("num_layers", "num_hidden_layers")
    decoders = config.layers("num_decoder_layers", default=encoders)
    projection = config.config.get(
        "feed_forward_proj", "gated-gelu" if config.config["model_type"] == "mt5" else "relu"
    )
    gated = str(projection).startswith("gated-")
    attention, feed_forward = [hidden * heads * inner_dim] * 4, [hidden * ffn] * (3 if gated else 2)
    return Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=inner_dim,
        vocab=vocab,
        max_positions=None,
        gated=gated,
        blocks=[
            Block(encoders, attention + feed_forward, 2 * hidden),
            Block(decoders, 2 * attention + feed_forward, 3 * hidden),
        ],
        # The first block of each stack has a table of relative positions.
        tables=[vocab * hidden, *[config.size("relative_attention_num_buckets", default=32) * heads] * 2],
        head=vocab * hidden,
        tied=True,  # transformers 5 ties them even if tie_word_embeddings is false
        fails_with_fsdp2=True,
        others=2 * hidden,
    )


def _bert(config: ConfigReader) -> Parts:
    """bert and roberta with the masked-LM head; they differ in how many positions are usable."""
    hidden, ffn, vocab = config.size("hidden_size"), config.size("intermediate_size"), config.size("vocab_size")
    heads, positions = config.heads(hidden, "num_attention_heads"), config.size("max_position_embeddings")
    tied = config.flag("tie_word_embeddings", True)
    # roberta's positions start after the padding token's.
    roberta = config.config["model_type"] == "roberta"
    reserved = config.size("pad_token_id", default=1, least=0) + 1 if roberta else 0
    if positions <= reserved:
        raise config.refuse(f"max_position_embeddings is {positions}, of which {reserved} are reserved")
    return Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        max_positions=positions - reserved,
        gated=False,
        blocks=[Block(config.layers("num_hidden_layers"), [*[hidden**2] * 4, *[hidden * ffn] * 2], 9 * hidden + ffn)],
        tables=[vocab * hidden, positions * hidden, config.size("type_vocab_size", default=2) * hidden],
        head=vocab * hidden,
        tied=tied,
        fails_with_fsdp2=True,
        matrices=[hidden**2],
        # The embeddings' norm; the head's bias and norm; the output's bias, which exists twice when not tied.
        others=2 * hidden + 3 * hidden + vocab * (1 if tied else 2),
    )


def _gpt2(config: ConfigReader) -> Parts:
    hidden, vocab = config.size("n_embd", "hidden_size"), config.size("vocab_size")
    heads = config.heads(hidden, "n_head", "num_attention_heads")
    positions = config.size("n_positions", "max_position_embeddings", default=1024)
    ffn = config.size("n_inner", default=4 * hidden)
    matrices, others = [3 * hidden**2, hidden**2, *[hidden * ffn] * 2], 9 * hidden + ffn
    return Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        max_positions=positions,
        gated=False,
        blocks=[Block(config.layers("n_layer", "num_hidden_layers"), matrices, others)],
        tables=[vocab * hidden, positions * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", True),
        others=2 * hidden,
    )


def _gpt_neox(config: ConfigReader) -> Parts:
    hidden, ffn, vocab = config.size("hidden_size"), config.size("intermediate_size"), config.size("vocab_size")
    heads = config.heads(hidden, "num_attention_heads")
    biases = 5 * hidden + ffn if config.flag("attention_bias", True) else hidden + ffn
    matrices = [3 * hidden**2, hidden**2, *[hidden * ffn] * 2]
    return Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        max_positions=config.size("max_position_embeddings", default=2048),
        gated=False,
        blocks=[Block(config.layers("num_hidden_layers"), matrices, biases + 4 * hidden)],
        tables=[vocab * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", False),
        others=2 * hidden,
    )


def _other_decoder(config: ConfigReader) -> Parts:
    """A decoder of an unknown family, counted like a llama without biases; all experts are counted."""
    text = config.config.get(_TEXT_SECTION)
    if isinstance(text, Mapping):  # a model of images and text: those for images are not counted
        text_type = text.get("model_type")
        part = ConfigReader({**text, "model_type": str(text_type)}, config.name)
        return replace(parts_of(part), section=_TEXT_SECTION, estimated=True)
    if config.config.get("is_encoder_decoder") is True:
        raise config.refuse(f"encoder-decoder models of type {shorten(config.config['model_type'])} are not supported")
    hidden, vocab = config.size("hidden_size", "n_embd", "d_model", "dim"), config.size("vocab_size")
    # Without attention: as many heads as a usual model of this width would have.
    heads = config.size("num_attention_heads", "n_head", "n_heads", "num_heads", default=max(1, hidden // 64))
    kv_heads = config.size("num_key_value_heads", default=heads)
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    gated = config.config.get("intermediate_size") is not None
    names = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff")
    ffn = config.size(*names, default=4 * hidden)
    experts = config.size("num_local_experts", "num_experts", "n_routed_experts", default=1)
    active = min(experts, config.size("num_experts_per_tok", default=1))
    feed_forward = [hidden * ffn] * (3 if gated else 2)
    q, kv = heads * head_dim, kv_heads * head_dim
    matrices = [hidden * q, hidden * kv, hidden * kv, q * hidden, *feed_forward * active]
    # A token uses only the active experts; the others count as parameters outside its matrices.
    others = (experts - active) * sum(feed_forward) + (hidden * experts if experts > 1 else 0) + 2 * hidden
    layers = config.layers("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    positions = config.size("max_position_embeddings", "n_positions", default=0) or None
    return Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_positions=positions,
        gated=gated,
        blocks=[Block(layers, matrices, others)],
        tables=[vocab * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", False),
        others=hidden,
        fused=max((q + 2 * kv) * hidden, experts * (2 if gated else 1) * hidden * ffn),
        estimated=True,
    )


FAMILIES: dict[str, Callable[[ConfigReader], Parts]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _llama_like),
    **dict.fromkeys(("t5", "mt5"), _t5),
    **dict.fromkeys(("bert", "roberta"), _bert),
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}


def parts_of(config: ConfigReader) -> Parts:
    """The parts of the model that `config` describes; its model_type must be a text.

    ModelNotAccessibleError if a needed field is missing or invalid.
    """
    return FAMILIES.get(config.config["model_type"], _other_decoder)(config)
