"""Turns a config.json into a ModelShape; default sequence length; the same model with fewer layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ladder.errors import ModelNotAccessibleError, UsageError
from ladder.workload.config_guard import OWN_CODE_NOTE, ConfigReader, shorten
from ladder.workload.counted import Count, Counted, shipped
from ladder.workload.lora import Lora
from ladder.workload.modules import Module, expanded, multiplied, with_fewer_layers
from ladder.workload.trained import check_targets
from ladder.workload.workload import CountedBlock, ModelShape, Source, Task

_LAYER_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)


def shape_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    source: Source,
    note: str = "",
    task: Task | None = None,
    count: Count | None = None,
) -> ModelShape:
    """The shape of the model that `config`, the content of a config.json, describes, for `task` or its usual one.

    It is as shipped for a bundled model, or else as `count` finds it. ModelNotAccessibleError if there is neither or it
    is no model of text, UsageError if it cannot be trained for `task`.
    """
    reader = ConfigReader(config, name)
    model_type = config.get("model_type")
    if model_type is None or model_type == "":
        raise reader.refuse("model_type is missing")
    if not isinstance(model_type, str):
        raise reader.refuse(f"model_type is {shorten(model_type)}, not a name")
    if config.get("per_layer_config"):
        raise reader.refuse("its layers differ (per_layer_config), which is not supported")
    counted = shipped(config, task) or (count(config, task, None) if count is not None else Counted(problem=_NOBODY))
    if counted.spellings is not None:
        raise reader.refuse(_unknown(model_type, counted.spellings, needs_code=OWN_CODE_NOTE in note))
    if counted.problem:
        raise reader.refuse(counted.problem)
    if not counted.tasks:
        raise ModelNotAccessibleError(
            f"{shorten(name)} cannot be trained here: transformers has no class for {shorten(model_type)} that learns "
            "text (causal-lm, masked-lm or seq2seq-lm); name a language model."
        )
    if counted.sizes is None:
        possible = " or ".join(counted.tasks)
        raise UsageError(f"A {shorten(model_type)} model is trained as {possible}, not as {task}; leave --task out.")
    return shape_from_sizes(
        counted.sizes, config=config, name=name, source=source, note=note, task=task or counted.tasks[0]
    )


_NOBODY = "no transformers was asked what it has"


def _unknown(model_type: str, spellings: Sequence[str], *, needs_code: bool) -> str:
    """What to do about a type that transformers does not know, to follow "cannot be used:"."""
    what = f"transformers does not know model type {shorten(model_type)}"
    if needs_code:
        return (
            f"{what}, so it needs code from the Hub, which ladder never runs; give a model that transformers has a "
            "class for, or your training script behind `--`"
        )
    if spellings:
        return f"{what}; write {' or '.join(map(repr, spellings))} in its config.json"
    return f"{what}; a newer transformers may, or give your training script behind `--`"


def shape_from_sizes(sizes: Mapping[str, Any], *, note: str = "", **own: Any) -> ModelShape:
    """The shape with these `sizes`, which were counted, and fields of its `own`."""
    sizes = dict(sizes)
    block, others = sizes.pop("block", None), sizes.pop("blocks_with", {})
    model_type = own["config"]["model_type"]
    if sizes.pop("is_recurrent") and block is not None:
        note = f"{note} {shorten(model_type)} has layers with a state: predictions are for transformers' own code, "
        note += "which keeps far more for backward than kernels of mamba-ssm and the like; trials measure it."
    elif block is None:
        note = f"{note} What a layer of {shorten(model_type)} does could not be counted, so its memory and speed are "
        note += "first predicted as a usual layer's; trials measure them."
    sizes |= {**own, "config": dict(own["config"]), "rows": tuple(sizes["rows"])}
    return ModelShape(model_type=model_type, note=note.strip(), **blocks_in(block, others), **sizes)


def blocks_in(block: Mapping[str, float] | None, others: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A model's own block, and those with techniques, as fields of ModelShape."""
    return {
        "block": CountedBlock(**block) if block else None,
        "blocks_with": {name: CountedBlock(**other) for name, other in others.items()},
    }


def with_adapters(shape: ModelShape, lora: Lora | None, count: Count | None) -> ModelShape:
    """`shape` with what peft trains of it by adapters that only peft can tell; as it is for others.

    UsageError if a name matches nothing, or peft does not take them.
    """
    if lora is None or not lora.more or count is None:
        return shape
    check_targets(shape, lora)
    found = count(shape.config, shape.task, lora.for_peft())
    if found.sizes is None or found.refused:
        raise UsageError(
            f"peft does not take these adapters for {shorten(shape.name)}: {found.refused or found.problem}."
        )
    return ModelShape(**_fields(shape) | {"rows": tuple(found.sizes["rows"])})


def roughly_shaped(config: Mapping[str, Any], *, name: str, source: Source, task: Task) -> ModelShape:
    """The shape of a model that learns no text, as a script's own may be: of usual layers with the sizes in `config`.

    ModelNotAccessibleError if a size is missing.
    """
    reader = ConfigReader(config, name)
    hidden = reader.size("hidden_size", "n_embd", "d_model", "dim")
    heads = reader.size("num_attention_heads", "n_head", "n_heads", "num_heads", default=max(1, hidden // 64))
    layers = reader.layers("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    net = reader.size("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", default=4 * hidden)
    vocabulary = reader.size("vocab_size", default=1)
    of_block = 4 * hidden**2 + 2 * hidden * net
    outside = vocabulary * hidden
    return ModelShape(
        name=name,
        source=source,
        config=dict(config),
        model_type=str(config.get("model_type")),
        hidden_size=hidden,
        intermediate_size=net,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        vocab_size=vocabulary,
        max_positions=None,
        num_parameters=layers * of_block + outside,
        num_matmul_parameters=layers * of_block + outside,
        num_block_parameters=of_block,
        largest_parameter=max(hidden * net, outside),
        gated_mlp=False,
        is_encoder_decoder=False,
        task=task,
    )


def default_seq_len(shape: ModelShape) -> int:
    """The default sequence length in tokens: 2048, or less if the model has fewer positions; 512 with an encoder."""
    usual = 512 if shape.is_encoder_decoder else 2048  # T5 was trained with 512; its relative positions have no limit
    return min(usual, shape.max_positions or shape.made_for or usual)


def depth_of(shape: ModelShape) -> int:
    """Layers of the model, or of its encoder: the number that `with_layers` changes."""
    sizes = _sizes(shape)
    return int(next((sizes[key] for key in _LAYER_KEYS if sizes.get(key) is not None), shape.num_layers))


def with_layers(shape: ModelShape, num_layers: int) -> ModelShape:
    """The same model with `num_layers` blocks, or with that many encoder and that many decoder blocks.

    Its configuration is changed too, including lists with an entry per layer. ValueError below one layer.
    """
    if num_layers < 1:
        raise ValueError(f"a model needs at least one layer, not {num_layers}")
    sizes, before = _sizes(shape), depth_of(shape)
    keys = [key for key in _LAYER_KEYS if sizes.get(key) is not None]
    # transformers gives every family's own name this one too.
    sizes |= dict.fromkeys(keys or ["num_hidden_layers"], num_layers)
    for key, value in sizes.items():
        if "layer" in key and isinstance(value, list) and len(value) == before:
            sizes[key] = [value[index % before] for index in range(num_layers)]
    stacks = 2 if shape.is_encoder_decoder else 1
    return _changed(shape, sizes, num_layers=stacks * num_layers)


def with_vocabulary(shape: ModelShape, most: int) -> ModelShape:
    """The same model with at most `most` tokens in its vocabulary; special tokens beyond them are removed."""
    if shape.vocab_size <= most:
        return shape
    sizes = _sizes(shape)
    gone = {
        key: None
        for key, value in sizes.items()
        if key.endswith("_token_id") and any(each >= most for each in _as_list(value) if isinstance(each, int))
    }
    return _changed(shape, {**sizes, **gone, "vocab_size": most}, vocab_size=most)


def shape_again(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    """The shape of `config`, which is that of `shape` or one that `with_layers` made of it."""
    again = ModelShape(**{**_fields(shape), "config": dict(config)})
    return shape if shape.config == config else with_layers(shape, depth_of(again))


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """The part of the configuration that has the language model's sizes."""
    return dict(shape.config.get(shape.section) or {}) if shape.section else dict(shape.config)


def _changed(
    shape: ModelShape, sizes: Mapping[str, Any], *, num_layers: int | None = None, vocab_size: int | None = None
) -> ModelShape:
    """`shape` with these `sizes`, and with the counts that follow from them, as counting takes a process.

    They are an estimate where layers differ, as blocks are the mean of all, and where embeddings are narrow. Probes use
    them, and no user sees them.
    """
    config = {**shape.config, shape.section: dict(sizes)} if shape.section else dict(sizes)
    num_layers, vocab_size = num_layers or shape.num_layers, vocab_size or shape.vocab_size
    rows = with_fewer_layers(shape.rows, num_layers // (2 if shape.is_encoder_decoder else 1))
    before, after = shape.modules, expanded(rows)
    gone = sum(each.elements for each in before) - sum(each.elements for each in after)
    products = _elements_for_a_token(before) - _elements_for_a_token(after)
    if not gone:  # layers that share their parameters take none along
        products = (1 - num_layers / shape.num_layers) * (
            shape.num_matmul_parameters - shape.vocab_size * shape.hidden_size
        )
    fewer_tokens = (shape.vocab_size - vocab_size) * shape.hidden_size
    changes = {
        "config": config,
        "num_layers": num_layers,
        "vocab_size": vocab_size,
        "num_parameters": shape.num_parameters - gone - fewer_tokens * (1 if shape.tied else 2),
        "num_matmul_parameters": round(shape.num_matmul_parameters - products - fewer_tokens),
        "rows": rows,
    }
    return ModelShape(**_fields(shape) | changes)


def _elements_for_a_token(modules: Iterable[Module]) -> float:
    return sum(each.size * each.share for each in multiplied(modules))


def _fields(shape: ModelShape) -> dict[str, Any]:
    return {field.name: getattr(shape, field.name) for field in fields(shape)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
