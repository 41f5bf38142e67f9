"""Parameter counts are those of the real classes, and nonsense in a configuration is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.shapes import SMALL

from ladder.errors import ModelNotAccessibleError, UsageError
from ladder.workload.counted import Counted
from ladder.workload.shapes import (
    check_task,
    default_seq_len,
    default_task,
    depth_of,
    shape_again,
    shape_from_config,
    with_layers,
    with_vocabulary,
)
from ladder.workload.source import resolve_model
from ladder.workload.workload import CountedBlock, ModelShape


def small(**changes: Any) -> ModelShape:
    return shape_from_config(SMALL | changes, name="small", source="file")


def test_changing_the_layers_changes_the_configuration_and_its_lists_of_layers() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    shape = small(model_type="qwen2", num_key_value_heads=2, layer_types=kinds, eos_token_id=[1, 2, 3])
    assert with_layers(shape, 2).config["layer_types"] == kinds[:2]
    assert with_layers(shape, 4).config["layer_types"] == [*kinds, kinds[0]]
    assert with_layers(shape, 2).config["num_hidden_layers"] == 2
    assert with_layers(shape, 2).config["eos_token_id"] == [1, 2, 3]
    assert shape.config["num_hidden_layers"] == 3


def test_the_language_model_of_several_parts_is_an_estimate_without_transformers() -> None:
    nested = {"model_type": "gemma3", "text_config": {**SMALL, "num_hidden_layers": 4}, "vision_config": {}}
    shape = shape_from_config(nested, name="small", source="file")
    assert shape.num_parameters == small(num_hidden_layers=4).num_parameters
    assert "estimate" in shape.note
    assert small(model_type="brandnew").num_parameters == small().num_parameters
    two = with_vocabulary(with_layers(shape, 2), 50)
    assert (two.num_layers, two.vocab_size, depth_of(shape)) == (2, 50, 4)
    assert two.config == {**nested, "text_config": {**SMALL, "num_hidden_layers": 2, "vocab_size": 50}}
    assert shape_again(shape, with_layers(shape, 2).config).num_layers == 2


COUNTED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_positions": 128,
    "section": "text_config",
    "num_parameters": 1_000_000,
    "num_matmul_parameters": 464_000,
    "num_block_parameters": 110_000,
    "num_parameters_in_blocks": 400_000,
    "largest_parameter": 64_000,
    "gated_mlp": True,
    "is_encoder_decoder": False,
    "tied": True,
    "checkpoints": True,
    "is_recurrent": False,
    "block": dict.fromkeys(
        ("kept", "kept_by_length", "kept_for_weights", "moved", "moved_by_length", "kernels", "tensors"), 1.0
    ),
}


def counted_shape(config: dict[str, Any], **changes: Any) -> ModelShape:
    def count(config: Any, task: Any) -> Counted:
        return Counted(tasks=("causal-lm",), sizes=COUNTED | changes)

    return shape_from_config(config, name="small", source="file", count=count)


def test_what_transformers_counted_is_no_estimate_and_fewer_layers_have_their_share_of_it() -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 4, "layer_types": list("abab")}}
    shape = counted_shape(config)
    assert (shape.num_parameters, shape.note, shape.task) == (1_000_000, "", "causal-lm")
    assert shape.block == CountedBlock(**COUNTED["block"])
    assert "could not be counted" in counted_shape(config, block=None).note
    assert "layers with a state" in counted_shape({"model_type": "mamba"}, section="", is_recurrent=True).note
    one = with_layers(shape, 1)
    assert one.config["text_config"] == {"num_hidden_layers": 1, "layer_types": ["a"]}
    assert (one.num_parameters, one.num_parameters_in_blocks) == (700_000, 100_000)
    assert one.num_matmul_parameters == 100_000 + 64_000
    assert shape_again(shape, one.config) == one
    assert shape_again(shape, shape.config) is shape
    fewer = with_vocabulary(shape, 500)
    assert (fewer.num_parameters, fewer.num_matmul_parameters) == (968_000, 432_000)
    without_a_key = counted_shape({"model_type": "gemma3", "text_config": {}})
    assert with_layers(without_a_key, 2).config["text_config"] == {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
@pytest.mark.parametrize("value", [None, 0, -1, True, 4.0, float("nan"), "4", "9" * 5000, [[1]], {"a": {}}, 10**30])
def test_a_needed_field_that_is_no_sensible_number_is_refused_in_a_short_sentence(key: str, value: Any) -> None:
    with pytest.raises(ModelNotAccessibleError, match=key) as refusal:
        small(**{key: value})
    assert len(str(refusal.value)) < 250
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_attention_heads": 5}, "do not divide"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_key_value_heads": -4}, "num_key_value_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers"),
        ({"model_type": "roberta", "max_position_embeddings": 2}, "reserved"),
        ({"model_type": "roberta", "pad_token_id": -1}, "pad_token_id"),
        ({"per_layer_config": {"0": {"hidden_size": 1}}}, "per_layer_config"),
        ({"model_type": "brandnew", "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelNotAccessibleError, match=words):
        small(**changes)


@pytest.mark.parametrize(
    ("name", "task", "seq_len"),
    [
        ("llama-2-7b", "causal-lm", 2048),
        ("opt-125m", "causal-lm", 2048),
        ("roberta-base", "masked-lm", 512),
        ("t0-3b", "seq2seq-lm", 512),
    ],
)
def test_task_and_sequence_length_follow_from_the_model(name: str, task: str, seq_len: int) -> None:
    shape = resolve_model(name)
    assert default_task(shape.model_type, shape.config) == task
    assert default_seq_len(shape) == seq_len
    assert default_task("electra", {"architectures": ["ElectraForMaskedLM"]}) == "masked-lm"
    assert default_task("electra", {"architectures": "nonsense"}) == "causal-lm"
    check_task("brandnew", {}, "masked-lm")
    if task != "causal-lm":
        with pytest.raises(UsageError, match=f"{task}, not as causal-lm"):
            check_task(shape.model_type, shape.config, "causal-lm")


def test_a_smaller_vocabulary_takes_the_special_tokens_beyond_it_along() -> None:
    whole = resolve_model("llama-3.2-1b")
    few = with_vocabulary(whole, 32_768)
    assert few.vocab_size == few.config["vocab_size"] == 32_768
    assert few.config["eos_token_id"] is None
    assert few.num_parameters == whole.num_parameters - (whole.vocab_size - 32_768) * whole.hidden_size
    assert with_vocabulary(resolve_model("opt-125m"), 32_768).config["pad_token_id"] == 1
    assert with_vocabulary(whole, 200_000) is whole
