"""MODEL is a path, a bundled name or a Hub id, in this order; its configuration is data that nobody has checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ladder.errors import ModelNotAccessibleError
from ladder.workload import source as model_source
from ladder.workload.config_guard import OWN_CODE_NOTE, checked_config
from ladder.workload.counted import Counted
from ladder.workload.source import bundled_models, resolve_model, smoke_defaults

TINY = dict(resolve_model("tiny-llama").config)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hub is unreachable, and what was asked of it is listed."""
    asked: list[str] = []

    def unreachable(hub_id: str) -> Path:
        asked.append(hub_id)
        raise model_source._HubError(f"The Hub cannot be reached for {hub_id!r}")

    monkeypatch.setattr(model_source, "_fetch", unreachable)
    monkeypatch.setattr(model_source, "_offline", lambda: False)
    return asked


def write_config(folder: Path, config: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY if config is None else config))
    return folder


def test_bundled_names_are_found_in_any_case_without_asking_the_hub(no_hub: list[str]) -> None:
    assert resolve_model("LLAMA-2-7b").num_parameters == 6_738_415_616
    assert resolve_model("Llama-2-7B").source == "bundled"
    assert no_hub == []


def test_every_bundled_file_gives_a_shape_and_its_hub_ids_are_not_shared() -> None:
    hub_ids = [
        hub_id.lower() for path in bundled_models().values() for hub_id in json.loads(path.read_text())["hub_ids"]
    ]
    assert len(hub_ids) == len(set(hub_ids))
    assert all(resolve_model(name).note == "" for name in bundled_models())
    assert all(model_source._is_hub_id(hub_id) for hub_id in hub_ids)


@pytest.mark.parametrize("name", ["folder", "with space", 'it\'s "quoted"', "näme;rm"])
def test_a_folder_and_its_config_json_give_the_same_shape(tmp_path: Path, name: str) -> None:
    folder = write_config(tmp_path / name)
    from_folder, from_file = resolve_model(str(folder)), resolve_model(str(folder / "config.json"))
    assert (from_folder.source, from_file.source) == ("folder", "file")
    assert from_folder.num_parameters == from_file.num_parameters == 20_453_760


def test_a_run_folder_named_after_a_bundled_model_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny-llama").source == "bundled"
    write_config(tmp_path / "llama-2-7b")
    assert resolve_model("llama-2-7b").source == "folder"


def test_a_hub_id_out_of_reach_falls_back_to_its_bundled_shape_and_says_so(no_hub: list[str]) -> None:
    shape = resolve_model("Meta-Llama/llama-2-7B-HF")
    assert no_hub == ["Meta-Llama/llama-2-7B-HF"]
    assert (shape.source, shape.name) == ("bundled", "Meta-Llama/llama-2-7B-HF")
    assert "cannot be reached" in shape.note
    assert "bundled shape llama-2-7b" in shape.note
    assert shape.note.endswith("is used instead.")


def test_an_unknown_hub_id_out_of_reach_names_what_to_do_and_close_names() -> None:
    with pytest.raises(ModelNotAccessibleError, match=r"cannot be reached.*folder with its config\.json.*llama-2-7b"):
        resolve_model("someone/llama-2-7")


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "--flag", "../../x", "/nowhere/at/all", "a\nb", "\x1b[31mred", "a--b/c", "x" * 97, "x" * 5000),
        *("org/..", "org/name.git", "org/na me", "org/", "/", "datasets/../x", "$(reboot)", "löwe"),
    ],
)
def test_a_name_that_can_be_no_model_is_refused_in_a_sentence_without_asking_the_hub(
    text: str, no_hub: list[str]
) -> None:
    with pytest.raises(ModelNotAccessibleError) as refusal:
        resolve_model(text)
    assert no_hub == []
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_kernels", True),
        ("kernel_config", {"a": "b"}),
        ("_attn_implementation", "someone/kernel"),
        ("_attn_implementation_internal", "someone/kernel"),
        ("attn_implementation", {"": "sdpa", "text_config": "someone/kernel"}),
        ("experts_implementation", "someone/kernel"),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_would_run_code_or_fetch_weights_is_refused_by_its_key(key: str, value: Any, nested: bool) -> None:
    hostile = {"text_config": [{key: value}]} if nested else {key: value}
    with pytest.raises(ModelNotAccessibleError, match=rf"its {key} "):
        checked_config(TINY | hostile, "model")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModelForCausalLM": "modeling.Evil"}),
        ("auto_map", [[["modeling.Evil"]]]),
        ("custom_pipelines", {"x": {}}),
        ("trust_remote_code", True),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_names_code_that_a_model_brings_is_left_out_at_any_depth_with_a_note(
    key: str, value: Any, nested: bool
) -> None:
    clean, note = checked_config(TINY | ({"sub": [{key: value}]} if nested else {key: value}), "model")
    assert clean == TINY | ({"sub": [{}]} if nested else {})
    assert note == OWN_CODE_NOTE
    assert checked_config(TINY | {key: None}, "model") == (TINY, "")


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_transformers_unpacks_are_trained_in_16_bits_with_a_note_that_says_how(
    method: str, nested: bool
) -> None:
    section = {"quantization_config": {"quant_method": method, "modules_to_not_convert": ["lm_head"]}}
    clean, note = checked_config(TINY | ({"text_config": section} if nested else section), "model")
    assert clean == TINY | ({"text_config": {}} if nested else {})
    assert "16 bits" in note
    assert f"{method} weights" in note
    assert "(dequantize=True)" in note


@pytest.mark.parametrize(
    ("quantisation", "option"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "--load-in 4bit"),
        ({"load_in_8bit": True}, "--load-in 8bit"),
        ({"quant_method": "awq"}, "--load-in 4bit"),
        ({"quant_method": ["fp8"]}, "--load-in 4bit"),
        ("gptq", "--load-in 4bit"),
        ({}, "--load-in 4bit"),
    ],
)
def test_other_quantised_weights_are_refused_with_the_options_that_train_beside_such_weights(
    quantisation: Any, option: str
) -> None:
    with pytest.raises(ModelNotAccessibleError, match=rf"original model.*--lora r=16 {option}\."):
        checked_config(TINY | {"quantization_config": quantisation}, "model")


@pytest.mark.parametrize("key", ["text_config", "vision_config", "quantization_config", "per_layer_config"])
def test_a_section_that_is_null_is_absent(key: str) -> None:
    assert checked_config(TINY | {key: None}, "model") == (TINY, "")


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering", "RewardModel"])
def test_a_classifier_is_tuned_as_a_language_model_and_a_note_names_the_way_to_tune_it_itself(head: str) -> None:
    clean, note = checked_config(TINY | {"architectures": [f"LlamaFor{head}"]}, "model")
    assert clean["architectures"] == [f"LlamaFor{head}"]
    assert f"not as 'LlamaFor{head}'" in note
    assert "script behind `--`" in note


@pytest.mark.parametrize("architectures", [["T5ForConditionalGeneration"], ["GPT2LMHeadModel", 5], [], 5, None])
def test_other_architectures_need_no_note(architectures: Any) -> None:
    assert checked_config(TINY | {"architectures": architectures}, "model")[1] == ""


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
def test_an_implementation_that_may_come_from_the_hub_is_left_out_with_a_note(key: str) -> None:
    harmless = {"trust_remote_code": False, "quantization_config": None, "use_kernels": False}
    assert checked_config(TINY | harmless | {"_attn_implementation": "sdpa"}, "model")[1] == ""
    config, note = checked_config(TINY | {key: "flash_attention_2"}, "model")
    assert config == TINY
    assert key in note


def test_where_a_file_came_from_and_its_dtype_are_left_out_at_any_depth() -> None:
    extra = {"_name_or_path": "/home/a", "torch_dtype": "load", "dtype": "x"}
    assert checked_config(TINY | extra | {"sub": extra}, "model")[0] == TINY | {"sub": {}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b'"text"', "not a JSON object"),
        (b" \n", "is empty"),
        (json.dumps(TINY).encode("utf-16"), "not JSON in UTF-8"),
        (b"[{}]", "not a JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON|nested"),
        (b'{"attn_implementation": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
        (b'{"hidden_size": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
        (b" " * (1 << 20) + b"{}", "1 MiB"),
        (b"{}", "model_type"),
    ],
)
def test_a_file_that_is_no_model_configuration_is_refused_in_a_sentence(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelNotAccessibleError, match=words) as refusal:
        resolve_model(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_a_folder_without_configuration_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotAccessibleError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelNotAccessibleError, match="not a regular file"):
        resolve_model(str(tmp_path))


def test_a_byte_order_mark_before_the_configuration_is_skipped(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "config.json").read_bytes())
    assert resolve_model(str(tmp_path)).config == TINY


def test_numbers_that_are_not_finite_are_kept_as_transformers_writes_them(tmp_path: Path) -> None:
    write_config(tmp_path, TINY | {"limits": [0.0, float("inf"), float("-inf"), float("nan")]})
    numbers = ("Infinity", "-Infinity", "NaN")
    read: list[Any] = []
    with pytest.raises(ModelNotAccessibleError, match="strange"):
        resolve_model(
            str(tmp_path), count=lambda config, *_: read.append(config["limits"]) or Counted(problem="strange")
        )
    assert read == [[0.0, *({"__float__": number} for number in numbers)]]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["tokenizer.json", "tokenizer_config.json"], "is a tokenizer; give .*its model"),
        (["model-q4.GGUF"], "GGUF.*made from"),
        (["model-00001-of-00002.safetensors", "tokenizer.json"], "weights but no config.json; give the model's folder"),
        (["model_index.json", "x.safetensors"], "pipeline of diffusers.*give a language model"),
        (
            ["adapter_model.safetensors", "tokenizer.json", "adapter_config.json"],
            "is an adapter of 'org/base'.*--lora-file",
        ),
        (["README.md", "train.py"], "has no config.json; give the folder that has one"),
    ],
)
def test_a_folder_or_a_file_that_is_no_model_is_said_to_be_what_it_is(
    tmp_path: Path, files: list[str], words: str
) -> None:
    for file in files:
        (tmp_path / file).write_text('{"base_model_name_or_path": "org/base"}')
    last = tmp_path / files[-1]
    for path in (tmp_path, last) if len(files) == 1 or last.name == "adapter_config.json" else (tmp_path,):
        with pytest.raises(ModelNotAccessibleError, match=words) as refusal:
            resolve_model(str(path))
        assert repr(str(path)) in str(refusal.value)


def test_an_adapter_that_does_not_name_its_model_and_a_script_are_said_to_be_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotAccessibleError, match="is an adapter; give its base model"):
        resolve_model(str(tmp_path))
    (tmp_path / "train.py").write_text("import torch")
    with pytest.raises(ModelNotAccessibleError, match="is a script; give its command behind `--`"):
        resolve_model(str(tmp_path / "train.py"))


@pytest.mark.parametrize("inner", ["checkpoint-500", "snapshots/0a1b"])
def test_a_folder_of_checkpoints_is_answered_with_one_of_them(tmp_path: Path, inner: str) -> None:
    write_config(tmp_path / inner)
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(ModelNotAccessibleError, match=rf"no config.json; give the folder '{tmp_path / inner}'"):
        resolve_model(str(tmp_path))


def test_a_link_to_a_missing_configuration_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for target in ("gone", "config.json"):
        config.symlink_to(target)
        for path in (tmp_path, config):
            with pytest.raises(ModelNotAccessibleError, match=rf"'{config}' is a link to a file that is missing"):
                resolve_model(str(path))
        config.unlink()


@pytest.mark.parametrize("name", ["model", "org/model"])
def test_a_folder_that_may_not_be_read_is_not_asked_for_at_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: list[str]
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    write_config(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ModelNotAccessibleError, match=f"'{name}' cannot be read: Permission denied"):
        resolve_model(name)
    assert no_hub == []


def test_only_a_bundled_model_has_defaults_for_a_quick_try(tmp_path: Path) -> None:
    assert smoke_defaults(resolve_model("Tiny-Llama")) == {
        "seq_len": 16,
        "global_batch_size": 8,
        "gpu_memory": "400MiB",
    }
    assert smoke_defaults(resolve_model("llama-2-7b")) is None
    assert smoke_defaults(resolve_model("meta-llama/Llama-2-7b-hf")) is None
    assert smoke_defaults(resolve_model(str(write_config(tmp_path / "tiny-llama")))) is None
