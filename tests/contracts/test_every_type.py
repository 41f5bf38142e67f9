"""Of every type of model that transformers has: its parameters, adapters, packed and frozen weights, to the last one.

The gate asks for some; `make night` for all that can be built from their default configurations.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, BitsAndBytesConfig
from transformers.integrations import replace_with_bnb_linear
from transformers.integrations.bitsandbytes import bnb

import ladder
from ladder.errors import LadderError
from ladder.trial import count
from ladder.trial.model_class import auto_class, model_config, tasks_of
from ladder.trial.partly import _freeze
from ladder.workload.config_guard import checked_config
from ladder.workload.counted import counted_from
from ladder.workload.lora import Lora
from ladder.workload.shapes import shape_from_config, shape_from_sizes
from ladder.workload.workload import ModelShape, Workload

SOME = 80
"""In the gate every so many-th type of all. Chosen: half a minute."""
AT_NIGHT = pytest.mark.night("every type of transformers takes ten minutes")


ALL = [
    pytest.param(name, marks=[] if number % SOME == 0 else [AT_NIGHT])
    for number, name in enumerate(sorted(CONFIG_MAPPING))
]


@cache
def _raw(name: str) -> dict[str, Any]:
    """The default configuration of a type, as its config.json would say it. Skips what is no model of text."""
    try:
        config = CONFIG_MAPPING[name]()
        raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        raw, _ = checked_config({**raw, "model_type": name}, name)
        tasks = tasks_of(model_config(raw))
    except Exception as error:
        pytest.skip(f"transformers has no default for it ({type(error).__name__})")
    if not tasks:
        pytest.skip("it learns no text")
    return raw


def _model(raw: dict[str, Any]) -> Any:
    config = model_config(raw)
    with torch.device("meta"):
        return auto_class(config, tasks_of(config)[0]).from_config(config)


@pytest.fixture
def raw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(count, "_count_blocks", lambda *_: None)  # what blocks do is another test's
    found = _raw(request.param)
    try:
        _model(found)
    except Exception as error:
        pytest.skip(f"transformers cannot build its default ({type(error).__name__})")
    return found


def _shape(raw: dict[str, Any]) -> ModelShape:
    reply = count.counted(dict(raw), None)
    return shape_from_sizes(reply["sizes"], config=raw, name="default", source="file", task=reply["tasks"][0])


def _workload(shape: ModelShape, **changes: Any) -> Workload:
    return Workload(model=shape, task=shape.task, seq_len=8, global_batch_size=1, **changes)


def _adapted(raw: dict[str, Any], lora: Lora) -> int | None:
    """Elements that peft trains; None where it has no adapters for the model."""
    try:
        with torch.device("meta"):
            adapted = get_peft_model(_model(raw), LoraConfig(**lora.for_peft()))
    except Exception:
        return None
    trained: int = adapted.get_nb_trainable_parameters()[0]
    return trained


@pytest.mark.parametrize("raw", ALL, indirect=True)
def test_what_is_known_of_a_type_is_what_its_model_and_the_libraries_say(raw: dict[str, Any]) -> None:
    shape, model = _shape(raw), _model(raw)
    parameters = list(model.parameters())
    assert shape.num_parameters == sum(each.numel() for each in parameters)
    assert sum(each.elements for each in shape.modules) == shape.num_parameters
    assert shape.largest_parameter == max(each.numel() for each in parameters)
    for lora in (Lora(rank=2), Lora(rank=2, targets=_of_attention(shape))):
        if lora.targets and (trained := _adapted(raw, lora)) is not None:
            assert _workload(shape, lora=lora).weights.trained == trained, lora.targets
    packed = _packed(_model(raw))
    assert _workload(shape, lora=Lora(rank=2), load_in="4bit").weights.quantised == packed
    for pattern in _patterns(shape):
        _freeze(again := _model(raw), (pattern,))
        left = sum(each.numel() for each in again.parameters() if each.requires_grad)
        assert _workload(shape, freeze=(pattern,)).weights.trained == left, pattern


def _of_attention(shape: ModelShape) -> tuple[str, ...]:
    """The last names of the linear layers of attention."""
    found = {each.last_name for each in shape.modules if each.kind == "linear" and "att" in each.name.lower()}
    return tuple(sorted(found - {each.last_name for each in shape.modules if each.kind == "experts"}))


def _packed(model: Any) -> int:
    """Elements that bitsandbytes packs."""
    head = model.get_output_embeddings()
    kept = [name for name, module in model.named_modules() if module is head and head is not None]
    replace_with_bnb_linear(model, kept, BitsAndBytesConfig(load_in_4bit=True))
    return sum(each.in_features * each.out_features for each in model.modules() if isinstance(each, bnb.nn.Linear4bit))


def _patterns(shape: ModelShape) -> list[str]:
    """A block, the table of tokens, and one kind of layer in all blocks."""
    blocks = [each for each in shape.modules if each.layer == 0]
    tables = [each.name for each in shape.modules if each.kind == "table" and each.share][:1]
    if not blocks:
        return tables
    kinds = [".".join("*" if part.isdigit() else part for part in blocks[-1].name.split("."))]
    return [*tables, *kinds]


def test_an_unknown_type_and_one_that_is_written_otherwise_are_named() -> None:
    for model_type, words in (("Llama", "write 'llama'"), ("qwen3-moe", "write 'qwen3_moe'"), ("nothing", "newer")):
        with pytest.raises(LadderError, match=words):
            shape_from_config(
                {"model_type": model_type},
                name="other",
                source="file",
                count=lambda config, task, _: counted_from(count.counted(dict(config), task)),
            )


def test_no_text_in_the_package_is_the_name_of_a_type() -> None:
    """What a model has is asked of the model: a table of names would know some of them only."""
    named = [
        (path.name, node.value)
        for path in sorted(Path(ladder.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in CONFIG_MAPPING
    ]
    assert named == []
