"""A user's own script as a workload: what is read from its command and from the look, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import TINY, TINY_CONFIG, machine_with, make_candidate, make_measurement, make_record, space_on
from helpers.answers import answer
from helpers.families import COUNTED
from helpers.scripts import make_script, script_workload
from helpers.tunes import TWO_RANKS, ZERO1_AND_ZERO2
from helpers.values import bundled_workload

from ladder.backends.deepspeed.backend import DEEPSPEED
from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.cli.main import _with_script
from ladder.cli.tune_result import _in_a_training, _speed_of_a_training
from ladder.emit import best_config, emit_all, load_best_config, trainer_arguments
from ladder.emit.settings import settings_in
from ladder.errors import UsageError
from ladder.launch.base import Deadlines
from ladder.launch.rank_environment import environment_of_trials, script_environment
from ladder.machine.machine_speed import machine_speed
from ladder.options.checks import require_workload
from ladder.options.plan import PlanOptions
from ladder.options.tune import TuneOptions, WorkloadOptions
from ladder.runs.snapshot import space_from_dict, space_to_dict
from ladder.techniques.registry import TECHNIQUES
from ladder.tuning.answering import answer_of
from ladder.tuning.own_script import (
    global_batch_of,
    mapping_of,
    optimizer_in,
    script_spec,
    shape_of,
    suiting,
    suits_script,
    task_of,
    with_preparation,
    workload_of_script,
)
from ladder.tuning.verification import _verification
from ladder.units import GIB
from ladder.workload.counted import Counted
from ladder.workload.lora import Lora
from ladder.workload.script import CountedOptimizer, Script, told, writing_into
from ladder.workload.workload import Workload


def test_a_script_reads_the_hub_in_its_trials_as_it_does_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    others = {
        "HF_TOKEN_PATH": "/home/me/token",
        "HUGGING_FACE_HUB_TOKEN": "hf_old",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }
    for name, value in {"HF_TOKEN": "hf_mine", **others}.items():
        monkeypatch.setenv(name, value)
    own = environment_of_trials(TWO_RANKS, script_workload(make_script()))
    assert (own.get("HF_HUB_OFFLINE"), own["HF_TOKEN"], own["HF_HUB_DISABLE_TELEMETRY"]) == (None, "hf_mine", "1")
    assert own == own | others
    assert own == script_environment(TWO_RANKS), "as in the look"
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert environment_of_trials(TWO_RANKS, script_workload(make_script()))["TRANSFORMERS_OFFLINE"] == "1"
    synthetic = environment_of_trials(TWO_RANKS, bundled_workload())
    assert (synthetic["HF_HUB_OFFLINE"], synthetic["HF_TOKEN"]) == ("1", ""), "without a script, nothing is read there"


# Its optimizer

H200 = machine_speed("NVIDIA H200", "cuda", 1, 16)
MUON = CountedOptimizer(states=5.0, states_of_16_bits=2.5, products=51_200.0, by_shape=True)


def test_an_optimizer_that_goes_by_shapes_is_not_divided_by_zero_and_counts_as_the_look_saw_it() -> None:
    script = make_script(optimizer="Muon", counted=MUON)
    workload = script_workload(script)
    reasons = {name: DEEPSPEED.obstacle(workload, RUNGS_BY_NAME[name]) for name in ("zero0", "zero1", "zero2", "zero3")}
    assert [name for name, reason in reasons.items() if "flattens" in reason] == ["zero1", "zero2", "zero3"]
    assert (workload.state_bytes(), workload.state_bytes(2.0)) == (5.0, 2.5)
    assert not suits_script(TECHNIQUES["adam-8bit"], script), "it would be told in vain"
    assert Script.from_dict(json.loads(json.dumps(script.as_dict()))).facts.counted == MUON


@pytest.mark.parametrize(
    ("kind", "optimizer", "named"),
    [
        ("trainer", "adamw_torch", "adamw_torch_fused"),
        ("trainer", "Lion", None),
        ("accelerate", "AdamW", "adamw_torch_fused"),
    ],
)
def test_no_file_of_an_answer_names_another_optimizer_than_a_trainer_s_own(
    kind: str, optimizer: str, named: str | None, tmp_path: Path
) -> None:
    script = make_script(kind=kind, optimizer=optimizer)
    found = replace(
        answer("zero2"), workload=script_workload(script, global_batch_size=answer("zero2").workload.global_batch_size)
    )
    emit_all(found, tmp_path / "best_config.json")
    arguments = json.loads((tmp_path / "best_config.trainer.json").read_text())
    assert arguments.get("optim") == named
    again = settings_in(load_best_config(tmp_path / "best_config.json"))
    assert trainer_arguments(again, tmp_path / "best_config.json") == arguments


@pytest.mark.parametrize("rung", ["ddp", "zero0", "fsdp2"])
def test_what_the_look_counted_of_an_optimizer_is_in_its_memory_and_in_its_seconds(rung: str) -> None:
    counts = (None, MUON, replace(MUON, states=1.0))
    adam, muon, small = (script_workload(make_script(optimizer="Own", counted=each)) for each in counts)
    backend, tried = backend_of(RUNGS_BY_NAME[rung]), make_candidate(rung)
    states = [backend.moments(each, tried, 1, "cuda")[0].optimizer for each in (adam, muon, small)]
    assert [states[0] - each for each in states] == [0, 3 * adam.weights.trained, 7 * adam.weights.trained]
    steps = [backend.assignment(each, tried, 1).time_on(H200).update for each in (adam, muon, small)]
    assert steps[2] < steps[1], "smaller states are read and written faster"
    assert steps[0] < steps[1], "products take longer than the states that they spare"


@pytest.mark.parametrize(
    ("kind", "optimizer", "is_offloaded"),
    [
        ("trainer", "adamw_torch_fused", True),
        ("trainer", "sgd", True),
        ("trainer", "adafactor", False),
        ("trainer", "paged_adamw_8bit", False),
        ("accelerate", "AdamW", True),
        ("accelerate", "DeepSpeedCPUAdam", False),
        ("deepspeed", "DeepSpeedCPUAdam", True),
        ("deepspeed", "FusedAdam", False),
        ("deepspeed", "", True),
    ],
)
def test_a_script_s_optimizer_is_offloaded_only_if_it_stays_what_it_is(
    kind: str, optimizer: str, is_offloaded: bool
) -> None:
    workload = script_workload(make_script(kind=kind, optimizer=optimizer))
    for rung in ("zero2+opt-cpu", "zero3+param-nvme+opt-nvme"):
        reason = DEEPSPEED.obstacle(workload, RUNGS_BY_NAME[rung])
        assert (reason == "") is is_offloaded
        assert is_offloaded or reason.endswith(f"would replace the script's optimizer, {optimizer}")
    for rung in ("zero2", "zero3+param-cpu"):
        assert DEEPSPEED.obstacle(workload, RUNGS_BY_NAME[rung]) == ""


# Its command


@pytest.mark.parametrize(
    ("typed", "heard"),
    [
        (
            ["tune", "--gpus", "1", "--", "train.py", "--lr", "1"],
            ["tune", "--gpus", "1", "--script=train.py", "--script=--lr", "--script=1"],
        ),
        (["run", "best.json", "--", "train.py", ""], ["run", "best.json", "--script=train.py", "--script="]),
        (["tune", "--"], ["tune"]),
        (["models", "--", "train.py"], ["models", "--", "train.py"]),
        ([], []),
    ],
)
def test_words_behind_two_dashes_reach_the_script_as_they_were_typed(typed: list[str], heard: list[str]) -> None:
    assert _with_script(typed) == heard


# What options say of it


@pytest.mark.parametrize(
    ("command", "told_so"),
    [
        ("train.py --bs 1 --acc=16 --lr 1", "train.py --bs 8 --acc=2 --lr 1"),
        ("train.py --acc 4", "train.py --acc 2 --bs 8"),
        ("train.py --bs=1 --bs=2", "train.py --bs=8 --bs=8 --acc 2"),
    ],
)
def test_a_loop_is_told_its_micro_batch_and_accumulation_by_its_own_options(command: str, told_so: str) -> None:
    options = {"micro_batch": "--bs", "accumulation": "--acc"}
    assert " ".join(told(command.split(), options, micro_batch=8, accumulation=2)) == told_so
    assert told(command.split(), {}, micro_batch=8, accumulation=2) == tuple(command.split()), "unknown, so unchanged"


@pytest.mark.parametrize("word", ["micro_batch", "micro_batch=", "micro_batch=batch", "seq_len=--length", "=--x", "\a"])
def test_a_mapping_names_the_script_s_own_options_or_is_refused_with_what_it_could_name(word: str) -> None:
    mapped = mapping_of(["micro_batch=--batch-size", "accumulation=-a"])
    assert mapped == {"micro_batch": "--batch-size", "accumulation": "-a"}
    assert mapping_of([]) == {}
    with pytest.raises(UsageError, match=r"is not NAME=--OPTION, with NAME one of micro_batch, accumulation") as error:
        mapping_of([word])
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("command", "mapped", "sequences"),
    [
        (["train.py"], {}, 4 * 2 * 2),
        (["train.py", "--bs", "16"], {"micro_batch": "--bs"}, 16 * 2 * 2),
        (["train.py", "--bs=16", "--acc", "1"], {"micro_batch": "--bs", "accumulation": "--acc"}, 16 * 2),
        (["train.py", "--bs", "8", "--bs=16"], {"micro_batch": "--bs"}, 16 * 2 * 2),
        (["train.py", "--bs-of-mine", "16"], {"micro_batch": "--bs"}, 4 * 2 * 2),
        (["train.py", "--bs"], {"micro_batch": "--bs"}, 4 * 2 * 2),
    ],
)
def test_the_global_batch_is_what_the_script_trains_with_on_so_many_ranks(
    command: list[str], mapped: dict[str, str], sequences: int
) -> None:
    assert global_batch_of(make_script(*command), mapped, 2) == sequences


def test_the_global_batch_of_a_deepspeed_file_counts_on_any_number_of_ranks() -> None:
    script = make_script("train.py", "--bs", "16", global_batch=48)
    assert [global_batch_of(script, {}, world_size) for world_size in (1, 4)] == [48, 48]
    assert global_batch_of(script, {"micro_batch": "--bs"}, 2) == 16 * 2 * 2, "what is mapped is the user's own word"
    with pytest.raises(UsageError, match="--map micro_batch=--bs: many is not a number"):
        global_batch_of(make_script("train.py", "--bs", "many"), {"micro_batch": "--bs"}, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Name a MODEL, or your own script behind --"),
        ({"model": "tiny-llama", "script": ("train.py",)}, "tiny-llama and a script are both named"),
        ({"script": ("train.py",), "task": "causal-lm"}, "--task has no effect on a script"),
        ({"script": ("train.py",), "seq_len": 64}, "--seq-len has no effect on a script"),
        ({"model": "tiny-llama", "map": ("micro_batch=--bs",)}, "--map is about the options of a script"),
    ],
)
def test_there_is_either_a_model_or_a_script(options: dict[str, Any], words: str) -> None:
    for kind in (TuneOptions, PlanOptions):
        with pytest.raises(UsageError, match=words):
            require_workload(kind(**options))


# What the look found


@pytest.mark.parametrize(
    ("facts", "sample_len", "usual_share"),
    [
        ({"longest": 512, "mean_tokens": 128.0}, 512, 0.25),
        ({"longest": 512, "mean_tokens": 256.0, "rows": 2}, 1024, 0.25),  # a sample of two sequences counts as both
        ({"longest": 100, "mean_tokens": 100.5}, 100, 1.0),  # none is longer than the longest
    ],
)
def test_tokens_of_a_step_are_those_of_the_script_s_own_samples(
    facts: dict[str, Any], sample_len: int, usual_share: float
) -> None:
    workload = script_workload(make_script(**facts))
    assert (workload.sample_len, workload.usual_share) == (sample_len, usual_share)
    assert workload.tokens_per_step == 32 * facts["mean_tokens"]
    whole = replace(workload, script=None)
    assert (whole.usual_share, whole.tokens_per_step) == (1.0, 32 * facts["longest"])


def test_a_stored_space_has_all_of_the_script_that_is_needed_without_it() -> None:
    script = make_script("train.py", "--x", overrides=("FSDP",), modules=("trl",), num_samples=None)
    space, _ = space_on(script_workload(script), TWO_RANKS, ZERO1_AND_ZERO2, (1, 2))
    stored = json.loads(json.dumps(space_to_dict(space)))
    again = space_from_dict(stored)
    kept = replace(script, facts=replace(script.facts, modules=(), model_config_json={}))
    assert again == replace(space, workload=replace(space.workload, script=kept))
    assert again.workload.fingerprint() == space.workload.fingerprint()
    assert space_to_dict(again) == {**space_to_dict(space), "workload": space_to_dict(again)["workload"]}
    assert json.loads(json.dumps(space_to_dict(again))) == stored
    assert Script.from_dict(kept.as_dict()) == kept


def test_the_shape_is_that_of_the_model_s_configuration_with_the_parameters_that_were_counted() -> None:
    shape = shape_of(make_script(num_parameters=TINY.num_parameters + 100))
    assert shape == replace(
        TINY, name="train", source="file", num_parameters=TINY.num_parameters + 100, config=shape.config
    )


def test_the_shape_of_a_family_that_is_not_known_is_what_transformers_counts_with_the_parameters_seen() -> None:
    sizes = {name: getattr(TINY, name) for name in COUNTED} | {"num_layers": 7, "is_recurrent": False, "rows": []}
    script = make_script(model_config_json={"model_type": "other"}, num_parameters=123)
    shape = shape_of(script, lambda config, *_: Counted(tasks=("causal-lm",), sizes=sizes))
    assert (shape.num_layers, shape.num_parameters) == (7, 123)
    classifier = {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 3}
    shape = shape_of(make_script(model_config_json=classifier, num_parameters=99))
    assert (shape.num_layers, shape.num_parameters) == (3, 99)
    with pytest.raises(UsageError, match="the size of its model is not known"):
        shape_of(make_script(model_config_json={"model_type": "strange"}))
    with pytest.raises(UsageError, match=r"cannot be tuned: .* no class for 'other' that learns text"):
        shape_of(script, lambda config, *_: Counted(tasks=(), sizes=None))


@pytest.mark.parametrize("config", [{"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 3}, TINY_CONFIG])
def test_adapters_whose_names_match_nothing_count_as_if_all_blocks_had_them(config: dict[str, Any]) -> None:
    script = make_script(model_config_json=config, num_parameters=5_000, num_trainable=500)
    lora = Lora(rank=8, targets=(r".*\.(q|v)_proj",))
    workload = Workload(
        model=shape_of(script), task="causal-lm", seq_len=64, global_batch_size=8, lora=lora, script=script
    )
    assert (workload.weights.trained, workload.weights.reached_blocks) == (500, 1.0)


@pytest.mark.parametrize(
    ("facts", "task"),
    [
        ({}, "causal-lm"),
        ({"model_class": "RobertaForMaskedLM"}, "masked-lm"),
        ({"model_class": "BertForSequenceClassification"}, "causal-lm"),
        (
            {"model_class": "T5ForConditionalGeneration", "model_config_json": {"is_encoder_decoder": True}},
            "seq2seq-lm",
        ),
    ],
)
def test_the_task_follows_from_the_model_s_class(facts: dict[str, Any], task: str) -> None:
    assert task_of(make_script(**facts)) == task


@pytest.mark.parametrize(
    ("name", "counts_as"),
    [("adamw_torch_fused", "adamw"), ("AdamW", "adamw"), ("Adam", "adam"), ("SGD", "sgd"), ("adafactor", "adamw")],
)
def test_an_optimizer_counts_as_one_that_ladder_knows(name: str, counts_as: str) -> None:
    assert optimizer_in(make_script(optimizer=name)) == counts_as


@pytest.mark.parametrize(
    ("seen", "asked", "trained_in"),
    [
        ({"dtype": "fp32"}, None, "fp32"),
        ({"dtype": "fp32"}, "bf16", "bf16"),
        ({"dtype": "fp16"}, None, "fp16"),
        ({"dtype": "fp32", "held": "bfloat16"}, None, "bf16"),
        ({"dtype": "fp32", "held": "float16"}, None, "fp16"),
        ({"dtype": "fp32", "load_in": "4bit"}, None, "bf16"),
    ],
)
def test_a_script_keeps_its_precision_unless_its_owner_says_otherwise(
    seen: dict[str, Any], asked: Any, trained_in: str
) -> None:
    options = TuneOptions(script=("train.py",), dtype=asked)
    assert workload_of_script(make_script(**seen), options, TWO_RANKS, lambda _: None).dtype == trained_in


def test_output_folders_of_a_command_lead_elsewhere() -> None:
    command = ("train.py", "--output_dir", "mine", "--lr", "1", "--save-dir=also")
    assert " ".join(writing_into(command, "scratch")) == "train.py --output_dir scratch --lr 1 --save-dir=scratch"


# Its trials

ANY_SCRIPT = ["bf16-states", "hybrid", "unchecked-gradients", "bind-cores"]
"""What a script of any kind can be told."""


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("trainer", sorted({*TECHNIQUES} - {"ulysses", "hpz"})),
        ("accelerate", sorted(ANY_SCRIPT)),
        ("deepspeed", sorted(ANY_SCRIPT)),
    ],
)
def test_a_script_is_tried_only_with_what_it_can_be_told(kind: str, names: list[str]) -> None:
    script = make_script(kind=kind)
    assert sorted(name for name, technique in TECHNIQUES.items() if suits_script(technique, script)) == names


def test_a_technique_that_a_script_cannot_be_told_of_is_left_out_or_refused_if_it_was_allowed() -> None:
    loop = make_script(kind="accelerate")
    assert suiting([TECHNIQUES["liger"], TECHNIQUES["bf16-states"]], loop) == [TECHNIQUES["bf16-states"]]
    with pytest.raises(UsageError, match="--allow compile has no effect on this script"):
        suiting([TECHNIQUES["compile"]], loop)


def trial_of(script: Script, folder: Path) -> Any:
    workload, candidate = script_workload(script), make_candidate(micro_batch=4, accumulation=4)
    config = deepspeed_config(workload, candidate.engine, micro_batch=4, accumulation=4, world_size=2, nvme_path=None)
    return script_spec(workload, candidate, TWO_RANKS, config, folder)


def test_the_trial_of_a_script_has_the_arguments_of_its_candidate_and_a_folder_of_its_own(tmp_path: Path) -> None:
    script = make_script("train.py", "--lr", "1")
    spec = trial_of(script, tmp_path)
    assert (spec.command, spec.mode, spec.facts) == (script.command, "trial", script.facts)
    assert spec.scratch == str(tmp_path / "scratch")
    arguments = spec.arguments
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (4, 4)
    assert arguments["deepspeed"]["zero_optimization"]["stage"] == 2
    assert arguments["optim"].startswith("adamw")
    own = trial_of(make_script(optimizer="adafactor"), tmp_path)
    assert "optim" not in own.arguments, "what ladder has no name for stays the script's own"


def test_a_trial_may_take_as_long_as_the_script_needs_before_it_trains() -> None:
    before = Deadlines()
    after = with_preparation(before, script_workload(make_script(preparation_seconds=500.0)))
    assert after.model > before.model + 2 * 500
    assert after.total - before.total == after.model - before.model
    assert with_preparation(before, replace(script_workload(make_script()), script=None)) == before


# Its answer


def test_the_answer_says_what_was_tuned_and_how_fast_its_samples_go() -> None:
    script = make_script("train.py", "--name", "a 'b' c")
    seen = make_measurement(padding=0.25, loader_share=0.01)
    found = answer("zero2", workload={"script": script}, measurement=seen, tokens_per_second=12_800.0)
    said = best_config(found)["ladder"]["script"]
    assert (said["command"], said["sha256"]) == (["train.py", "--name", "a 'b' c"], script.facts.digest)
    assert (said["samples_per_second"], said["padding"], said["loader_share"]) == (100.0, 0.25, 0.01)


def test_a_range_of_speeds_is_in_every_file_and_on_the_last_line(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"workload": {"script": make_script()}, "tokens_per_second": 12_800.0}
    found = answer("zero2", **facts, tokens_per_second_range=(11_520.0, 14_080.0))
    found = replace(found, plain=replace(found, candidate=make_candidate("ddp", micro_batch=4, accumulation=2)))
    emit_all(found, tmp_path / "best_config.json")
    section = json.loads((tmp_path / "best_config.json").read_text())["ladder"]
    assert (section["tokens_per_second"], section["tokens_per_second_range"]) == (12_800.0, [11_520.0, 14_080.0])
    assert section["script"]["samples_per_second_range"] == [90.0, 110.0]
    assert section["plain"]["tokens_per_second_range"] == [11_520.0, 14_080.0]
    assert ", 11,520 to 14,080 tokens/s, peak" in (tmp_path / "best_config.launch.sh").read_text()
    assert _speed_of_a_training(found) == ", 11,520 to 14,080 tokens/s in a training"
    assert _speed_of_a_training(answer("zero2")) == ""


@pytest.mark.parametrize(
    ("changes", "promised", "said"),
    [
        ({}, 35.35, ", at most 35.35 GiB in a whole training"),
        ({"memory_limit": 141 * GIB // 4}, 35.25, ", at most 35.25 GiB in a whole training"),  # the limit
        ({"device": "cpu", "gpu_name": None}, None, ""),
        ({"workload": {}}, None, ""),  # a bare model
    ],
)
def test_a_whole_training_may_hold_a_hundredth_more_than_its_proof_but_no_more_than_the_limit(
    changes: dict[str, Any], promised: float | None, said: str
) -> None:
    found = answer("zero2", **{"workload": {"script": make_script()}, **changes})
    section = best_config(found)["ladder"]
    assert section["memory_per_gpu"]["peak_device_gib"] == 35.0
    assert section.get("script", {}).get("promised_device_gib") == promised
    assert _in_a_training(found) == said
    here = machine_with(gpus=4)
    record = make_record(found.candidate, measurement=found.measurement)
    seen = _verification(Path("best_config.json"), section, found.candidate, here, 0.05, record, 1.0)
    assert seen.promised_device_bytes == int((promised or 35.0) * GIB)


def test_a_script_that_freezes_a_part_of_its_model_has_no_states_for_it() -> None:
    script = make_script(num_parameters=TINY.num_parameters, num_trainable=TINY.num_parameters // 4)
    workload = workload_of_script(script, WorkloadOptions(), TWO_RANKS, print)
    assert workload.weights.trained == pytest.approx(TINY.num_parameters / 4, abs=1)


def test_the_memory_of_an_answer_is_that_of_the_longest_samples_even_if_the_proof_did_not_meet_them() -> None:
    workload, machine = script_workload(make_script()), machine_with(gpus=1)
    space, _ = space_on(workload, machine, ZERO1_AND_ZERO2, (1,))
    candidate = space.candidates[0]
    long, usual = (
        make_measurement(peak_allocated=most - 1, peak_reserved=most, peak_device=most + 1) for most in (9, 7)
    )
    trial = make_record(candidate, measurement=long)
    proof = make_record(candidate, measurement=usual, purpose="proof")
    seen = answer_of(proof, space, {}, {}, Path("run"), [trial, proof]).measurement
    assert (seen.peak_allocated, seen.peak_reserved, seen.peak_device) == (8, 9, 10)
