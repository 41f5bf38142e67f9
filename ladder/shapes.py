"""From a config.json to a ModelShape: exact parameter counts of the families we know, an estimate for other decoders.

The counts are those of transformers' own classes with a language-model head, which tests compare on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ladder.errors import ModelNotAccessibleError, UsageError
from ladder.workload import ModelShape, Source, Task

_LARGEST_DIMENSION = 10_000_000
_MOST_LAYERS = 10_000
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


@dataclass(frozen=True)
class _Block:
    """One kind of transformer block: how many there are, the elements of each weight matrix, biases and norms."""

    count: int
    matrices: list[int]
    others: int


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a model consists of, in elements, and the dimensions that a ModelShape reports."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    max_positions: int | None
    gated: bool
    blocks: list[_Block]
    tables: list[int]
    """Embedding tables, looked up."""
    head: int
    """The output matrix."""
    tied: bool
    matrices: list[int] = field(default_factory=list)
    """Further matrices outside the blocks."""
    others: int = 0
    """Norms and biases outside the blocks."""
    estimated: bool = False


class _Config:
    """Reads a config.json that nobody has checked; every complaint is a ModelNotAccessibleError naming the key."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def refuse(self, problem: str) -> ModelNotAccessibleError:
        return ModelNotAccessibleError(f"The configuration of {self.name!r} cannot be used: {problem}.")

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = _LARGEST_DIMENSION) -> int:
        """The first of `keys` that is set, as a number from `least` to `most`."""
        key = next((key for key in keys if self.config.get(key) is not None), None)
        if key is None:
            if default is None:
                raise self.refuse(f"{keys[0]} is missing")
            return default
        value = self.config[key]
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(f"{key} is {shorten(value)}, not a whole number from {least} to {most}")
        return value

    def layers(self, *keys: str, default: int | None = None) -> int:
        return self.size(*keys, default=default, most=_MOST_LAYERS)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shorten(value)}, not true or false")
        return value

    def heads(self, hidden: int, *keys: str) -> int:
        """The number of attention heads, which must divide `hidden`."""
        heads = self.size(*keys)
        if hidden % heads:
            raise self.refuse(f"{heads} attention heads do not divide a hidden size of {hidden}")
        return heads


def shorten(value: object, length: int = 60) -> str:
    """`value` as text for a message, whatever it is: escaped, and cut to `length` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def _llama_like(config: _Config) -> _Parts:
    """llama, mistral, qwen2, qwen3 and gemma: RMSNorm, rotary positions, grouped heads, a gated feed-forward net."""
    family = str(config.config["model_type"])
    hidden = config.size("hidden_size")
    free_head_dim = family in ("mistral", "qwen3", "gemma")
    heads = config.size("num_attention_heads") if free_head_dim else config.heads(hidden, "num_attention_heads")
    # transformers' own defaults for a key that is absent, which differ from those for a key that is null.
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
    return _Parts(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        max_positions=config.size("max_position_embeddings", default=0) or None,
        gated=True,
        blocks=[_Block(config.layers("num_hidden_layers"), matrices, biases + norms)],
        tables=[vocab * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", family == "gemma"),
        others=hidden,
    )


def _opt(config: _Config) -> _Parts:
    hidden, ffn, vocab = config.size("hidden_size"), config.size("ffn_dim"), config.size("vocab_size")
    heads, positions = config.heads(hidden, "num_attention_heads"), config.size("max_position_embeddings")
    width = config.size("word_embed_proj_dim", default=hidden)
    norm = 2 * hidden if config.flag("layer_norm_elementwise_affine", True) else 0
    biases = 5 * hidden + ffn if config.flag("enable_bias", True) else 0
    final_norm = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)
    return _Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        vocab=vocab,
        max_positions=positions,
        gated=False,
        blocks=[_Block(config.layers("num_hidden_layers"), [*[hidden**2] * 4, *[hidden * ffn] * 2], biases + 2 * norm)],
        tables=[vocab * width, (positions + 2) * hidden],  # two rows of the position table are never used
        head=vocab * width,
        tied=config.flag("tie_word_embeddings", True),
        matrices=[width * hidden] * 2 if width != hidden else [],
        others=norm if final_norm else 0,
    )


def _t5(config: _Config) -> _Parts:
    hidden, inner_dim, ffn = config.size("d_model", "hidden_size"), config.size("d_kv"), config.size("d_ff")
    heads, vocab = config.size("num_heads"), config.size("vocab_size")
    encoders = config.layers("num_layers", "num_hidden_layers")
    decoders = config.layers("num_decoder_layers", default=encoders)
    projection = config.config.get(
        "feed_forward_proj", "gated-gelu" if config.config["model_type"] == "mt5" else "relu"
    )
    gated = str(projection).startswith("gated-")
    attention, feed_forward = [hidden * heads * inner_dim] * 4, [hidden * ffn] * (3 if gated else 2)
    return _Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        vocab=vocab,
        max_positions=None,
        gated=gated,
        blocks=[
            _Block(encoders, attention + feed_forward, 2 * hidden),
            _Block(decoders, 2 * attention + feed_forward, 3 * hidden),
        ],
        # The first block of each stack has a table of relative positions.
        tables=[vocab * hidden, *[config.size("relative_attention_num_buckets", default=32) * heads] * 2],
        head=vocab * hidden,
        tied=True,  # transformers 5 ties them whatever tie_word_embeddings says
        others=2 * hidden,
    )


def _bert(config: _Config) -> _Parts:
    """bert and roberta with the masked-LM head; they differ in which positions are usable."""
    hidden, ffn, vocab = config.size("hidden_size"), config.size("intermediate_size"), config.size("vocab_size")
    heads, positions = config.heads(hidden, "num_attention_heads"), config.size("max_position_embeddings")
    tied = config.flag("tie_word_embeddings", True)
    # roberta numbers its positions from the one after the padding token's.
    roberta = config.config["model_type"] == "roberta"
    reserved = config.size("pad_token_id", default=1, least=0) + 1 if roberta else 0
    if positions <= reserved:
        raise config.refuse(f"max_position_embeddings is {positions}, and {reserved} of them are reserved")
    return _Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        vocab=vocab,
        max_positions=positions - reserved,
        gated=False,
        blocks=[_Block(config.layers("num_hidden_layers"), [*[hidden**2] * 4, *[hidden * ffn] * 2], 9 * hidden + ffn)],
        tables=[vocab * hidden, positions * hidden, config.size("type_vocab_size", default=2) * hidden],
        head=vocab * hidden,
        tied=tied,
        matrices=[hidden**2],
        # The embeddings' norm; the head's bias and norm; the output's bias, which exists twice when not tied.
        others=2 * hidden + 3 * hidden + vocab * (1 if tied else 2),
    )


def _gpt2(config: _Config) -> _Parts:
    hidden, vocab = config.size("n_embd", "hidden_size"), config.size("vocab_size")
    heads = config.heads(hidden, "n_head", "num_attention_heads")
    positions = config.size("n_positions", "max_position_embeddings", default=1024)
    ffn = config.size("n_inner", default=4 * hidden)
    matrices, others = [3 * hidden**2, hidden**2, *[hidden * ffn] * 2], 9 * hidden + ffn
    return _Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        vocab=vocab,
        max_positions=positions,
        gated=False,
        blocks=[_Block(config.layers("n_layer", "num_hidden_layers"), matrices, others)],
        tables=[vocab * hidden, positions * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", True),
        others=2 * hidden,
    )


def _gpt_neox(config: _Config) -> _Parts:
    hidden, ffn, vocab = config.size("hidden_size"), config.size("intermediate_size"), config.size("vocab_size")
    heads = config.heads(hidden, "num_attention_heads")
    biases = 5 * hidden + ffn if config.flag("attention_bias", True) else hidden + ffn
    matrices = [3 * hidden**2, hidden**2, *[hidden * ffn] * 2]
    return _Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=heads,
        vocab=vocab,
        max_positions=config.size("max_position_embeddings", default=2048),
        gated=False,
        blocks=[_Block(config.layers("num_hidden_layers"), matrices, biases + 4 * hidden)],
        tables=[vocab * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", False),
        others=2 * hidden,
    )


def _other_decoder(config: _Config) -> _Parts:
    """A decoder of a family we do not know, counted as a llama without biases; with experts, all of them."""
    if config.config.get("is_encoder_decoder") is True:
        raise config.refuse(f"encoder-decoder models of type {shorten(config.config['model_type'])} are not supported")
    hidden, vocab = config.size("hidden_size", "n_embd", "d_model"), config.size("vocab_size")
    heads = config.size("num_attention_heads", "n_head", "num_heads")
    kv_heads = config.size("num_key_value_heads", default=heads)
    head_dim = config.size("head_dim", default=max(1, hidden // heads))
    gated = config.config.get("intermediate_size") is not None
    ffn = config.size("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    experts = config.size("num_local_experts", "num_experts", "n_routed_experts", default=1)
    active = min(experts, config.size("num_experts_per_tok", default=1))
    feed_forward = [hidden * ffn] * (3 if gated else 2)
    q, kv = heads * head_dim, kv_heads * head_dim
    matrices = [hidden * q, hidden * kv, hidden * kv, q * hidden, *feed_forward * active]
    # A token meets only the active experts; the others are parameters all the same.
    others = (experts - active) * sum(feed_forward) + (hidden * experts if experts > 1 else 0) + 2 * hidden
    layers = config.layers("num_hidden_layers", "n_layer", "num_layers")
    positions = config.size("max_position_embeddings", "n_positions", default=0) or None
    return _Parts(
        hidden=hidden,
        intermediate=ffn,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        max_positions=positions,
        gated=gated,
        blocks=[_Block(layers, matrices, others)],
        tables=[vocab * hidden],
        head=vocab * hidden,
        tied=config.flag("tie_word_embeddings", False),
        others=hidden,
        estimated=True,
    )


_FAMILIES: dict[str, Callable[[_Config], _Parts]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _llama_like),
    **dict.fromkeys(("t5", "mt5"), _t5),
    **dict.fromkeys(("bert", "roberta"), _bert),
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}


def shape_from_config(config: Mapping[str, Any], *, name: str, source: Source, note: str = "") -> ModelShape:
    """The shape of the model that `config`, the content of a config.json, describes.

    Raises ModelNotAccessibleError when a needed field is missing or makes no sense. For a family we do not know the
    counts are an estimate, and the shape's `note` says so.
    """
    reader = _Config(config, name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise reader.refuse("model_type is missing")
    if config.get("per_layer_config"):
        raise reader.refuse("per_layer_config makes its layers differ, which is not supported")
    parts = _FAMILIES.get(model_type, _other_decoder)(reader)
    if parts.estimated:
        estimate = (
            f"Parameter counts of model type {shorten(model_type)} are an estimate; trials measure the real model."
        )
        note = f"{note} {estimate}".strip()
    block_matrices = sum(block.count * sum(block.matrices) for block in parts.blocks)
    block_others = sum(block.count * block.others for block in parts.blocks)
    outside = sum(parts.tables) + sum(parts.matrices) + parts.others + (0 if parts.tied else parts.head)
    return ModelShape(
        name=name,
        source=source,
        config=dict(config),
        model_type=model_type,
        hidden_size=parts.hidden,
        intermediate_size=parts.intermediate,
        num_layers=sum(block.count for block in parts.blocks),
        num_heads=parts.heads,
        num_kv_heads=parts.kv_heads,
        vocab_size=parts.vocab,
        max_positions=parts.max_positions,
        num_parameters=block_matrices + block_others + outside,
        num_matmul_parameters=block_matrices + sum(parts.matrices) + parts.head,
        num_block_parameters=max(sum(block.matrices) + block.others for block in parts.blocks),
        largest_parameter=max(*parts.tables, *parts.matrices, *(m for block in parts.blocks for m in block.matrices)),
        gated_mlp=parts.gated,
        is_encoder_decoder=len(parts.blocks) > 1,
        note=note,
    )


def default_task(model_type: str, config: Mapping[str, Any]) -> Task:
    """The task a model of this type is usually trained for: read from the family, then from `architectures`."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if model_type in ("t5", "mt5") or config.get("is_encoder_decoder") is True:
        return "seq2seq-lm"
    if model_type in ("bert", "roberta") or any(str(name).endswith("ForMaskedLM") for name in names):
        return "masked-lm"
    return "causal-lm"


def check_task(model_type: str, config: Mapping[str, Any], task: Task) -> None:
    """Raise UsageError if a model of a family we know cannot be trained for `task`."""
    possible = default_task(model_type, config)
    if model_type in _FAMILIES and task != possible:
        raise UsageError(f"A {model_type} model is trained as {possible}, not as {task}; leave --task out.")


def default_seq_len(shape: ModelShape) -> int:
    """Tokens of a sequence when the user does not say: 2048, or less where the model has fewer positions. T5: 512."""
    if shape.is_encoder_decoder:
        return 512  # what T5 was trained with; its relative positions set no limit
    return min(2048, shape.max_positions or 2048)


def with_layers(shape: ModelShape, num_layers: int) -> ModelShape:
    """The same model with `num_layers` blocks: as many encoder and as many decoder blocks where it has both.

    The configuration changes with it, lists with an entry for each layer included. ValueError below one layer.
    """
    if num_layers < 1:
        raise ValueError(f"a model needs at least one layer, not {num_layers}")
    config = dict(shape.config)
    before = next(config[key] for key in _LAYER_KEYS if config.get(key) is not None)
    config |= {key: num_layers for key in _LAYER_KEYS if config.get(key) is not None}
    for key, value in config.items():
        if "layer" in key and isinstance(value, list) and len(value) == before:
            config[key] = [value[index % before] for index in range(num_layers)]
    changed = shape_from_config(config, name=shape.name, source=shape.source)
    return ModelShape(**{**vars(changed), "note": shape.note})
