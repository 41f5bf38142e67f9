"""Turns a config.json into a ModelShape; default task and sequence length; the same model with fewer layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.errors import UsageError
from ladder.workload.config_guard import ConfigReader, shorten
from ladder.workload.counted import Count, scaled, shape_of_counted
from ladder.workload.families import FAMILIES, Parts, parts_of
from ladder.workload.workload import ModelShape, Source, Task

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
    """The shape of the model that `config`, the content of a config.json, describes.

    A family that is not known here is counted by `count`, for `task` or its usual one. Without that, or if it does not
    work, the counts are an estimate, and the shape's `note` says so. ModelNotAccessibleError if a needed field is
    missing or invalid, UsageError if a model that was counted cannot be trained for `task`.
    """
    reader = ConfigReader(config, name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise reader.refuse("model_type is missing")
    if config.get("per_layer_config"):
        raise reader.refuse("its layers differ (per_layer_config), which is not supported")
    if model_type not in FAMILIES and count is not None and (counted := count(config, task)) is not None:
        return shape_of_counted(config, counted, name=name, source=source, task=task, note=note)
    parts = parts_of(reader)
    if parts.estimated:
        estimate = (
            f"Parameter counts of model type {shorten(model_type)} are an estimate; trials measure the real model."
        )
        note = f"{note} {estimate}".strip()
    sizes = _sizes_of(parts)
    return ModelShape(name=name, source=source, config=dict(config), model_type=model_type, note=note, **sizes)


def _sizes_of(parts: Parts) -> dict[str, Any]:
    """The sizes of ModelShape that follow from the tensors."""
    block_matrices = sum(block.count * sum(block.matrices) for block in parts.blocks)
    block_others = sum(block.count * block.others for block in parts.blocks)
    outside = sum(parts.tables) + sum(parts.matrices) + parts.others + (0 if parts.tied else parts.head)
    return {
        "hidden_size": parts.hidden,
        "intermediate_size": parts.intermediate,
        "num_layers": sum(block.count for block in parts.blocks),
        "num_heads": parts.heads,
        "num_kv_heads": parts.kv_heads,
        "head_dim": parts.head_dim,
        "vocab_size": parts.vocab,
        "max_positions": parts.max_positions,
        "num_parameters": block_matrices + block_others + outside,
        "num_matmul_parameters": block_matrices + sum(parts.matrices) + parts.head,
        "num_block_parameters": max(sum(block.matrices) + block.others for block in parts.blocks),
        "largest_parameter": max(
            parts.fused, *parts.tables, *parts.matrices, *(m for block in parts.blocks for m in block.matrices)
        ),
        "gated_mlp": parts.gated,
        "is_encoder_decoder": len(parts.blocks) > 1,
        "tied": parts.tied,
        "fails_with_fsdp2": parts.fails_with_fsdp2,
        "section": parts.section,
    }


def default_task(model_type: str, config: Mapping[str, Any]) -> Task:
    """The usual training task for a model of this type, from its family or else from `architectures`."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if model_type in ("t5", "mt5") or config.get("is_encoder_decoder") is True:
        return "seq2seq-lm"
    if model_type in ("bert", "roberta") or any(str(name).endswith("ForMaskedLM") for name in names):
        return "masked-lm"
    return "causal-lm"


def check_task(model_type: str, config: Mapping[str, Any], task: Task) -> None:
    """Raise UsageError if a model of a known family cannot be trained for `task`."""
    possible = default_task(model_type, config)
    if model_type in FAMILIES and task != possible:
        raise UsageError(f"A {model_type} model is trained as {possible}, not as {task}; leave --task out.")


def usual_task(shape: ModelShape) -> Task:
    """The task that a model of this shape is trained for unless the user names another."""
    return shape.task or default_task(shape.model_type, shape.config)


def default_seq_len(shape: ModelShape) -> int:
    """The default sequence length in tokens: 2048, or less if the model has fewer positions; 512 with an encoder."""
    usual = 512 if shape.is_encoder_decoder else 2048  # T5 was trained with 512; its relative positions have no limit
    return min(usual, shape.max_positions or usual)


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
    if shape.task is None:
        return shape_from_config(config, name=shape.name, source=shape.source)
    again = ModelShape(**{**vars(shape), "config": dict(config)})
    return shape if shape.config == config else with_layers(shape, depth_of(again))


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """The part of the configuration that has the language model's sizes."""
    return dict(shape.config.get(shape.section) or {}) if shape.section else dict(shape.config)


def _changed(
    shape: ModelShape, sizes: Mapping[str, Any], *, num_layers: int | None = None, vocab_size: int | None = None
) -> ModelShape:
    """`shape` with these `sizes`; for one that was counted also their numbers, as counting takes a process."""
    config = {**shape.config, shape.section: dict(sizes)} if shape.section else dict(sizes)
    if shape.task is not None:
        return scaled(shape, config, num_layers or shape.num_layers, vocab_size or shape.vocab_size)
    changed = shape_from_config(config, name=shape.name, source=shape.source)
    return ModelShape(**{**vars(changed), "note": shape.note})


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
