"""What is counted of a model is what transformers builds of it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.shapes import FAMILIES, SMALL

from ladder.workload.shapes import default_task, shape_from_config, with_layers
from ladder.workload.source import bundled_models, resolve_model
from ladder.workload.workload import ModelShape


def real_parameters(shape: ModelShape) -> list[Any]:
    """The parameters transformers itself makes for `shape`, without memory behind them."""
    import torch
    import transformers

    classes = {
        "causal-lm": transformers.AutoModelForCausalLM,
        "masked-lm": transformers.AutoModelForMaskedLM,
        "seq2seq-lm": transformers.AutoModelForSeq2SeqLM,
    }
    fields = {key: value for key, value in shape.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(shape.model_type, **fields)
    with torch.device("meta"):
        model = classes[default_task(shape.model_type, shape.config)].from_config(config)
    return list(model.parameters())


@pytest.mark.parametrize("name", [*bundled_models(), *FAMILIES])
def test_counts_are_exactly_those_of_the_model_transformers_builds(name: str) -> None:
    whole = shape_from_config(FAMILIES[name], name=name, source="file") if name in FAMILIES else resolve_model(name)
    for shape in (whole, with_layers(whole, 2)):
        sizes = [parameter.numel() for parameter in real_parameters(shape)]
        assert shape.num_parameters == sum(sizes)
        assert shape.largest_parameter == max(sizes)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
        ("qwen3_moe", {"num_experts": 16, "moe_intermediate_size": 128, "num_key_value_heads": 2}),
        ("phi3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    ],
)
def test_no_tensor_of_a_family_that_fuses_matrices_is_larger_than_the_largest(
    family: str, fields: dict[str, Any]
) -> None:
    """Of a drive's buffers, and of what ZeRO-3 gathers at once, none may be too small for it."""
    shape = shape_from_config(SMALL | {"model_type": family} | fields, name="small", source="file")
    assert shape.largest_parameter >= max(parameter.numel() for parameter in real_parameters(shape))
