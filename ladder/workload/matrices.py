"""The matrices of a model by the names of their modules: what adapters, quantisation and freezing can name.

Names and sizes are those of transformers' classes; tests compare them on the meta device. A family that is not listed
gets the names of llama, as most decoders have them. Norms and biases are left out: they are below a thousandth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ladder.workload.workload import ModelShape


@dataclass(frozen=True)
class Matrix:
    """One matrix, or all experts' matrices that are stored as one."""

    module: str
    inputs: int
    outputs: int
    kind: Literal["linear", "experts", "table", "head"] = "linear"
    """Quantisation applies to linear layers only, adapters to experts too."""
    layer: int | None = None
    """The number of its block; None outside the blocks."""
    reads: str = ""
    """What its input is, as a letter of `_sizes`: "a" of attention, "q" from attention, "n" of the net, "f" inside."""
    count: int = 1
    """Matrices of this size in one tensor: one per expert."""
    fused: int = 1
    """How many projections are one; peft gives an expert's adapter the rank of each."""

    @property
    def elements(self) -> int:
        return self.count * self.inputs * self.outputs

    @property
    def is_linear(self) -> bool:
        return self.kind == "linear"

    @property
    def is_router(self) -> bool:
        """It sends tokens to experts."""
        return self.module.endswith(".mlp.gate")


@dataclass(frozen=True)
class _Names:
    """How a family names its modules; a pair of a name and its side (inputs, outputs) in the block's dimensions."""

    layers: str
    block: tuple[tuple[str, str, str], ...]
    """Linear layers of a block: name, inputs, outputs, in the letters of `_sizes`."""
    tables: tuple[tuple[str, str, str], ...]
    head: str = "lm_head"
    outside: tuple[tuple[str, str, str], ...] = ()
    """Linear layers outside the blocks, besides the head; those of a width "w" only if it is not the blocks'."""
    has_biased_head: bool = False
    """The head adds a vector of the vocabulary's size."""


_LLAMA_ATTENTION = (
    ("self_attn.q_proj", "a", "q"),
    ("self_attn.k_proj", "a", "k"),
    ("self_attn.v_proj", "a", "k"),
    ("self_attn.o_proj", "q", "h"),
)
_LLAMA_NET = (("mlp.gate_proj", "n", "f"), ("mlp.up_proj", "n", "f"), ("mlp.down_proj", "f", "h"))
_LLAMA = _Names("model.layers", _LLAMA_ATTENTION + _LLAMA_NET, (("model.embed_tokens", "v", "h"),))
_EXPERTS = _Names(
    "model.layers",
    (
        *_LLAMA_ATTENTION,
        ("mlp.gate", "n", "x"),
        ("mlp.experts.gate_up_proj", "n", "2f"),
        ("mlp.experts.down_proj", "f", "h"),
    ),
    (("model.embed_tokens", "v", "h"),),
)


def _bert_names(root: str, outside: str) -> _Names:
    return _Names(
        f"{root}.encoder.layer",
        (
            *((f"attention.self.{name}", "a", "h") for name in ("query", "key", "value")),
            ("attention.output.dense", "q", "h"),
            ("intermediate.dense", "n", "f"),
            ("output.dense", "f", "h"),
        ),
        (
            (f"{root}.embeddings.word_embeddings", "v", "h"),
            (f"{root}.embeddings.position_embeddings", "p", "h"),
        ),
        head="cls.predictions.decoder" if root == "bert" else "lm_head.decoder",
        outside=((outside, "h", "h"),),
        has_biased_head=True,
    )


_FAMILIES: dict[str, _Names] = {
    "opt": _Names(
        "model.decoder.layers",
        (
            *((f"self_attn.{name}_proj", "a", "h") for name in ("k", "v", "q")),
            ("self_attn.out_proj", "q", "h"),
            ("fc1", "n", "f"),
            ("fc2", "f", "h"),
        ),
        (("model.decoder.embed_tokens", "v", "w"), ("model.decoder.embed_positions", "p", "h")),
        outside=(("model.decoder.project_in", "w", "h"), ("model.decoder.project_out", "h", "w")),
    ),
    "gpt2": _Names(
        "transformer.h",
        (("attn.c_attn", "a", "3h"), ("attn.c_proj", "q", "h"), ("mlp.c_fc", "n", "f"), ("mlp.c_proj", "f", "h")),
        (("transformer.wte", "v", "h"), ("transformer.wpe", "p", "h")),
    ),
    "gpt_neox": _Names(
        "gpt_neox.layers",
        (
            ("attention.query_key_value", "a", "3h"),
            ("attention.dense", "q", "h"),
            ("mlp.dense_h_to_4h", "n", "f"),
            ("mlp.dense_4h_to_h", "f", "h"),
        ),
        (("gpt_neox.embed_in", "v", "h"),),
    ),
    "bert": _bert_names("bert", "cls.predictions.transform.dense"),
    "roberta": _bert_names("roberta", "lm_head.dense"),
}
_T5_ATTENTION = (("q", "a", "q"), ("k", "a", "q"), ("v", "a", "q"), ("o", "q", "h"))


_AS_LISTED = {
    *_FAMILIES,
    *("llama", "mistral", "qwen2", "qwen3", "gemma"),
    *("t5", "mt5", "mixtral", "qwen3_moe"),
}


def has_known_names(model: ModelShape) -> bool:
    """Whether the names are those of the model's own family, and not llama's in their place."""
    return model.model_type in _AS_LISTED


def matrices_of(model: ModelShape) -> tuple[Matrix, ...]:
    """All matrices of `model`, from the input to the output head."""
    if model.is_encoder_decoder:
        return tuple(_t5(model))
    names, sizes = _names_of(model), _sizes(model)
    tables = [Matrix(name, sizes[one], sizes[other], "table") for name, one, other in names.tables]
    blocks = [
        _in_block(f"{names.layers}.{layer}.{name}", sizes, one, other, layer)
        for layer in range(model.num_layers)
        for name, one, other in names.block
    ]
    outside = [
        Matrix(name, sizes[one], sizes[other])
        for name, one, other in names.outside
        if "w" not in (one, other) or sizes["w"] != sizes["h"]
    ]
    head = [] if model.tied else [Matrix(names.head, sizes["h"], sizes["v"], "head")]
    return (*tables, *blocks, *outside, *head)


def _names_of(model: ModelShape) -> _Names:
    return _FAMILIES.get(model.model_type, _EXPERTS if num_experts(model) > 1 else _LLAMA)


def tensors_of_a_block(model: ModelShape) -> int:
    """How many tensors a block's parameters are, about: its matrices, and vectors of the hidden size for the rest."""
    matrices, of_head = matrices_of(model), model.vocab_size if _names_of(model).has_biased_head else 0
    vectors = (model.num_parameters - of_head - sum(matrix.elements for matrix in matrices)) / model.hidden_size
    in_blocks = sum(matrix.layer is not None for matrix in matrices)
    return round((in_blocks + max(0.0, vectors)) / model.num_layers)


@dataclass(frozen=True)
class Product:
    """`count` products of the hidden values of `tokens` of a micro-batch's tokens with a matrix of this size."""

    inputs: int
    outputs: int
    count: int
    tokens: float = 1.0
    """The share of the tokens that each matrix sees: an expert gets few of them."""


def products_of(model: ModelShape) -> tuple[Product, ...]:
    """The matrix products of one forward pass, those of the same size together."""
    matrices = [matrix for matrix in matrices_of(model) if matrix.kind != "table"]
    if model.tied:
        matrices.append(Matrix("", _sizes(model)["w"], model.vocab_size, "head"))
    used = experts_of_a_token(model)
    shares = {matrix.count: used / matrix.count if matrix.kind == "experts" else 1.0 for matrix in matrices}
    counted = Counter((matrix.inputs, matrix.outputs, shares[matrix.count], matrix.count) for matrix in matrices)
    return tuple(
        Product(inputs, outputs, number * each, share) for (inputs, outputs, share, each), number in counted.items()
    )


def _sizes(model: ModelShape) -> dict[str, int]:
    h, f, experts = model.hidden_size, model.intermediate_size, num_experts(model)
    positions = model.config.get("max_position_embeddings") or model.config.get("n_positions") or 0
    return {
        "h": h,
        "a": h,
        "n": h,
        "3h": 3 * h,
        "q": model.num_heads * model.head_dim,
        "k": model.num_kv_heads * model.head_dim,
        "f": f,
        "v": model.vocab_size,
        "p": int(positions),
        "w": int(model.config.get("word_embed_proj_dim") or h),
        "2f": 2 * f,
        "x": experts,
    }


def _in_block(module: str, sizes: Mapping[str, int], one: str, other: str, layer: int) -> Matrix:
    if ".experts." not in module:
        return Matrix(module, sizes[one], sizes[other], layer=layer, reads=one)
    fused = 2 if other == "2f" else 1
    return Matrix(module, sizes[one], sizes[other], "experts", layer, one, count=sizes["x"], fused=fused)


def num_experts(model: ModelShape) -> int:
    """The experts of a block; 1 without any."""
    found = (model.config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    return next((number for number in found if isinstance(number, int)), 1)


def experts_of_a_token(model: ModelShape) -> int:
    """How many experts each token meets; 1 without experts."""
    active = model.config.get("num_experts_per_tok")
    return active if isinstance(active, int) and active > 0 else 1


def _t5(model: ModelShape) -> Iterator[Matrix]:
    """Two stacks of blocks; those of the decoder have a second attention."""
    sizes = _sizes(model)
    encoders = model.config.get("num_layers") or model.config.get("num_hidden_layers") or model.num_layers // 2
    net = ("wi_0", "wi_1", "wo") if model.gated_mlp else ("wi", "wo")
    yield Matrix("shared", model.vocab_size, model.hidden_size, "table")
    for layer in range(model.num_layers):
        is_decoder = layer >= encoders
        stack, number = ("decoder", layer - encoders) if is_decoder else ("encoder", layer)
        block = f"{stack}.block.{number}.layer"
        parts = ["0.SelfAttention", "1.EncDecAttention"] if is_decoder else ["0.SelfAttention"]
        for part in parts:
            for name, one, other in _T5_ATTENTION:
                yield Matrix(f"{block}.{part}.{name}", sizes[one], sizes[other], layer=layer, reads=one)
        for name in net:
            one, other = ("f", "h") if name == "wo" else ("n", "f")
            yield Matrix(
                f"{block}.{len(parts)}.DenseReluDense.{name}", sizes[one], sizes[other], layer=layer, reads=one
            )
