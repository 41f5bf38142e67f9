"""The names and sizes of matrices against transformers and peft, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.shapes import FAMILIES, SMALL
from peft import LoraConfig, get_peft_model

from ladder.errors import UsageError
from ladder.trial.model_class import auto_class, model_config
from ladder.workload.lora import Lora
from ladder.workload.matrices import matrices_of, products_of
from ladder.workload.shapes import default_task, shape_from_config
from ladder.workload.trained import adapter_elements, check_trained, targets_of
from ladder.workload.workload import ModelShape

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 8, "num_key_value_heads": 2},
    "qwen3_moe": SMALL | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
}
KNOWN = FAMILIES | EXPERTS


@pytest.fixture(params=KNOWN)
def shape(request: pytest.FixtureRequest) -> ModelShape:
    return shape_from_config(KNOWN[request.param], name=request.param, source="file")


def _on_meta(shape: ModelShape) -> Any:
    raw = dict(shape.config)
    with torch.device("meta"):
        config = model_config(raw)
        return auto_class(config, default_task(shape.model_type, raw)).from_config(config)


def test_every_matrix_has_the_name_and_the_size_that_transformers_gives_it(shape: ModelShape) -> None:
    real = {
        name.removesuffix(".weight"): parameter.numel()
        for name, parameter in _on_meta(shape).named_parameters()
        if parameter.dim() > 1
    }
    for matrix in matrices_of(shape):
        assert matrix.module in real
        # The tables of positions have a few rows more than there are positions.
        assert real.pop(matrix.module) == pytest.approx(matrix.elements, rel=0.5 if "position" in matrix.module else 0)
    assert sum(real.values()) < 0.01 * shape.num_parameters  # tables of token types and of relative positions


@pytest.mark.parametrize(
    "lora",
    [Lora(rank=2), Lora(rank=4, dora=True), Lora(rank=2, targets=("q_proj", "v_proj")), Lora(rank=2, targets=("o",))],
    ids=["all", "dora", "two", "one"],
)
def test_adapters_have_as_many_parameters_as_peft_gives_them(shape: ModelShape, lora: Lora) -> None:
    matrices = targets_of(lora, matrices_of(shape))
    if lora.dora and any(matrix.kind == "experts" for matrix in matrices):
        with pytest.raises(UsageError, match="peft has none for experts"):
            check_trained(shape, lora, None, ())
        return
    model = _on_meta(shape)
    if not matrices:
        with torch.device("meta"), pytest.raises(ValueError, match="not found"):
            get_peft_model(model, LoraConfig(**lora.for_peft()))
        return
    with torch.device("meta"):
        adapted = get_peft_model(model, LoraConfig(**lora.for_peft()))
    trained, _ = adapted.get_nb_trainable_parameters()
    assert sum(adapter_elements(lora, matrix) for matrix in matrices) == trained


def test_the_products_of_a_forward_pass_have_the_elements_that_operations_are_counted_with(shape: ModelShape) -> None:
    elements = sum(each.count * each.tokens * each.inputs * each.outputs for each in products_of(shape))
    assert elements == pytest.approx(shape.num_matmul_parameters, rel=0.02)  # without routers
