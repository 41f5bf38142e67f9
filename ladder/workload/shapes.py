"""Turns a config.json into a ModelShape; default task and sequence length; the same model with fewer layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.errors import UsageError
from ladder.workload.config_guard import ConfigReader, shorten
from ladder.workload.families import FAMILIES, parts_of
from ladder.workload.workload import ModelShape, Source, Task

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


def shape_from_config(config: Mapping[str, Any], *, name: str, source: Source, note: str = "") -> ModelShape:
    """The shape of the model that `config`, the content of a config.json, describes.

    ModelNotAccessibleError if a needed field is missing or invalid. For an unknown family the counts are an estimate,
    and the shape's `note` says so.
    """
    reader = ConfigReader(config, name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise reader.refuse("model_type is missing")
    if config.get("per_layer_config"):
        raise reader.refuse("its layers differ (per_layer_config), which is not supported")
    parts = parts_of(reader)
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
        head_dim=parts.head_dim,
        vocab_size=parts.vocab,
        max_positions=parts.max_positions,
        num_parameters=block_matrices + block_others + outside,
        num_matmul_parameters=block_matrices + sum(parts.matrices) + parts.head,
        num_block_parameters=max(sum(block.matrices) + block.others for block in parts.blocks),
        largest_parameter=max(
            parts.fused, *parts.tables, *parts.matrices, *(m for block in parts.blocks for m in block.matrices)
        ),
        gated_mlp=parts.gated,
        is_encoder_decoder=len(parts.blocks) > 1,
        tied=parts.tied,
        note=note,
    )


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


def default_seq_len(shape: ModelShape) -> int:
    """The default sequence length in tokens: 2048, or less if the model has fewer positions; 512 for T5."""
    if shape.is_encoder_decoder:
        return 512  # T5 was trained with it; relative positions have no limit
    return min(2048, shape.max_positions or 2048)


def depth_of(shape: ModelShape) -> int:
    """Layers of the model, or of its encoder: the number that `with_layers` changes."""
    return int(next(shape.config[key] for key in _LAYER_KEYS if shape.config.get(key) is not None))


def with_layers(shape: ModelShape, num_layers: int) -> ModelShape:
    """The same model with `num_layers` blocks, or with that many encoder and that many decoder blocks.

    Its configuration is changed too, including lists with an entry per layer. ValueError below one layer.
    """
    if num_layers < 1:
        raise ValueError(f"a model needs at least one layer, not {num_layers}")
    config = dict(shape.config)
    before = depth_of(shape)
    config |= {key: num_layers for key in _LAYER_KEYS if config.get(key) is not None}
    for key, value in config.items():
        if "layer" in key and isinstance(value, list) and len(value) == before:
            config[key] = [value[index % before] for index in range(num_layers)]
    return _changed(shape, config)


def with_vocabulary(shape: ModelShape, most: int) -> ModelShape:
    """The same model with at most `most` tokens in its vocabulary; special tokens beyond them are removed."""
    if shape.vocab_size <= most:
        return shape
    gone = {
        key: None
        for key, value in shape.config.items()
        if key.endswith("_token_id") and any(each >= most for each in _as_list(value) if isinstance(each, int))
    }
    return _changed(shape, {**shape.config, **gone, "vocab_size": most})


def _changed(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    changed = shape_from_config(config, name=shape.name, source=shape.source)
    return ModelShape(**{**vars(changed), "note": shape.note})


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
