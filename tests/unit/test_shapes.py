"""The shape of a model is what was counted of it, and what could not be counted is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.shapes import SMALL

from ladder.errors import ModelNotAccessibleError
from ladder.workload.config_guard import OWN_CODE_NOTE
from ladder.workload.counted import Counted, counted_from
from ladder.workload.shapes import (
    default_seq_len,
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
    "num_parameters": 464_064,
    "num_matmul_parameters": 464_000,
    "num_block_parameters": 100_064,
    "rows": [
        {"name": "embed", "kind": "table", "inputs": 1000, "outputs": 64, "elements": 64_000, "also": ["head"]},
        {"name": "layers.*.a", "kind": "linear", "inputs": 1000, "outputs": 100, "elements": 100_000}
        | {"layer": 0, "at": [[[0, 3]]]},
        {"name": "layers.*.norm", "kind": "other", "elements": 64, "layer": 0, "at": [[[3, 3]]]},
        {"name": "head", "kind": "head", "inputs": 64, "outputs": 1000, "elements": 0, "also": ["embed"]},
    ],
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
    def count(config: Any, *_: Any) -> Counted:
        return Counted(tasks=("causal-lm",), sizes=COUNTED | changes)

    return shape_from_config(config, name="small", source="file", count=count)


def test_what_transformers_counted_is_no_estimate_and_fewer_layers_have_their_share_of_it() -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 4, "layer_types": list("abab")}}
    shape = counted_shape(config)
    assert (shape.num_parameters, shape.note, shape.task) == (464_064, "", "causal-lm")
    assert shape.block == CountedBlock(**COUNTED["block"])
    assert "could not be counted" in counted_shape(config, block=None).note
    assert "layers with a state" in counted_shape({"model_type": "mamba"}, section="", is_recurrent=True).note
    one = with_layers(shape, 1)
    assert one.config["text_config"] == {"num_hidden_layers": 1, "layer_types": ["a"]}
    assert one.num_parameters == 164_000
    assert one.num_matmul_parameters == 100_000 + 64_000
    assert [each.name for each in one.modules] == ["embed", "layers.0.a", "head"]
    assert shape_again(shape, one.config) == one
    assert shape_again(shape, shape.config) is shape
    fewer = with_vocabulary(shape, 500)
    assert (fewer.num_parameters, fewer.num_matmul_parameters) == (432_064, 432_000)
    without_a_key = counted_shape({"model_type": "gemma3", "text_config": {}})
    assert with_layers(without_a_key, 2).config["text_config"] == {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\], not a name"),
        ({"per_layer_config": {"0": {"hidden_size": 1}}}, "per_layer_config"),
    ],
)
def test_a_configuration_without_a_type_or_with_layers_that_differ_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelNotAccessibleError, match=words):
        small(**changes)


@pytest.mark.parametrize(
    ("counted", "note", "words"),
    [
        (Counted(problem="torch is missing"), "", "cannot be used: torch is missing"),
        (Counted(spellings=("llama",)), "", "does not know model type 'llama'; write 'llama' in its config.json"),
        (Counted(spellings=()), "", "a newer transformers may, or give your training script"),
        (Counted(spellings=()), OWN_CODE_NOTE, "needs code from the Hub, which ladder never runs"),
        (Counted(), "", "no class for 'llama' that learns text"),
        (counted_from({"failed": "ValueError: " + 5000 * "9"}), "", "transformers cannot build it"),
    ],
)
def test_what_could_not_be_counted_is_refused_in_a_sentence_with_the_reason(
    counted: Counted, note: str, words: str
) -> None:
    with pytest.raises(ModelNotAccessibleError, match=words) as refusal:
        shape_from_config(SMALL | {"odd": 1}, name="small", source="file", note=note, count=lambda config, *_: counted)
    assert len(str(refusal.value)) < 300


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
    assert shape.task == task
    assert default_seq_len(shape) == seq_len


def test_a_smaller_vocabulary_takes_the_special_tokens_beyond_it_along() -> None:
    whole = resolve_model("llama-3.2-1b")
    few = with_vocabulary(whole, 32_768)
    assert few.vocab_size == few.config["vocab_size"] == 32_768
    assert few.config["eos_token_id"] is None
    assert few.num_parameters == whole.num_parameters - (whole.vocab_size - 32_768) * whole.hidden_size
    assert with_vocabulary(resolve_model("opt-125m"), 32_768).config["pad_token_id"] == 1
    assert with_vocabulary(whole, 200_000) is whole
