"""Every technique and way of checkpointing: named, stored and emitted, and read back as it was."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import bundled_workload, machine_with, problem_for, space_on
from helpers.answers import answer
from helpers.scripts import make_script, script_workload
from helpers.searches import BILLION, space_of

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import CHECKPOINTING, Candidate, Engine, Problem
from ladder.emit import Answer, OutputPaths, accelerate_config, best_config, launch_environment, launch_script
from ladder.emit.exporters.registry import exported
from ladder.emit.settings import settings_in
from ladder.emit.trainer import trainer_arguments
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.options.technique_choices import require_effective_techniques, require_usable, ways_of_checkpointing
from ladder.runs.snapshot import space_from_dict, space_to_dict
from ladder.techniques.keys import candidate_of, engine_named, rung_of
from ladder.techniques.registry import TECHNIQUES
from ladder.tuning.problem import problem_of
from ladder.units import GIB
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

ENGINES = [
    "zero2+opt-cpu+liger",
    "zero3+liger+bf16-states",
    "zero3+liger+adam-8bit",
    "zero1+unchecked-gradients",
    "zero3+liger+ulysses",
    "zero3+opt-cpu+liger+hpz=8",
    "fsdp2+hybrid=8",
    "fsdp2+liger+divided-gradients",
    "ddp+compile-whole",
    "ddp+compile+fp8",
    "zero2+opt-cpu+bind-cores",
]


def test_all_techniques_are_among_these_engines() -> None:
    assert {each.label.split("=")[0] for name in ENGINES for each in engine_named(name).techniques} == set(TECHNIQUES)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_s_name_and_a_run_folder_bring_it_back_with_its_knobs(name: str) -> None:
    engine = engine_named(name)
    assert engine.name == name
    assert engine.rung is rung_of(name)
    turned = replace(engine, knobs=(("overlap_comm", False), ("sub_group_size", 4)))
    assert turned.name == name
    candidate = Candidate(turned, 1, 2, 8)
    assert candidate_of(candidate.key, 16) == candidate
    space = space_of(engine, turned)
    assert space_from_dict(json.loads(json.dumps(space_to_dict(space)))) == space


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_candidate_s_key_and_the_answer_say_what_is_checkpointed_and_by_which_techniques(checkpointing: str) -> None:
    for name in ENGINES:
        candidate = candidate_of(f"{name} ckpt={checkpointing} mb=4", 32, 4)
        assert candidate.key == f"{name} ckpt={checkpointing} mb=4"
        if "=" not in name:
            document = json.loads(json.dumps(best_config(answer(candidate=candidate))))
            settings = settings_in(document)
            assert (settings.checkpointing, settings.techniques) == (checkpointing, candidate.engine.techniques)


@pytest.mark.parametrize(
    "name",
    ["zero9+liger", *(f"zero3+{each}" for each in ("hpz", "hpz=1", "hpz=x", "hpz=08", "liger=8", "liger=", "x["))],
)
def test_what_is_no_engine_is_none(name: str) -> None:
    with pytest.raises(KeyError):
        engine_named(name)
    with pytest.raises(ValueError, match="not a candidate's key"):
        candidate_of(f"{name} ckpt=on mb=1", 4)


@pytest.mark.parametrize(
    ("version", "ways"),
    [
        ("5.17.0", []),
        ("5.18.0", ["1/2"]),
        ("5.23.0", ["1/2", "cpu"]),
        ("6.0.0.dev0", ["1/2", "cpu"]),
        ("not there", []),
    ],
)
def test_a_way_of_checkpointing_needs_a_transformers_whose_trainer_has_it(version: str, ways: list[str]) -> None:
    assert sorted(ways_of_checkpointing(version)) == ways


# Where they are tried


@pytest.mark.parametrize(
    ("name", "rungs"),
    [
        ("liger", set(RUNGS_BY_NAME)),
        ("compile", {rung.name for rung in PLAIN_RUNGS}),
        ("compile-whole", {"ddp"}),
        ("fp8", {"ddp", "fsdp2", "fsdp2+no-reshard"}),
        ("bf16-states", {"zero1", "zero2", "zero3", "zero3+param-cpu"}),
        ("adam-8bit", {"zero1", "zero2", "zero3", "zero3+param-cpu"}),
        ("unchecked-gradients", {"zero1", "zero2"}),
        ("divided-gradients", {"fsdp2", "fsdp2+no-reshard", "fsdp2+cpu"}),
        ("bind-cores", {rung.name for rung in RUNGS_BY_NAME.values() if rung.devices}),
    ],
)
def test_a_technique_is_tried_on_the_rungs_that_can_have_it(name: str, rungs: set[str]) -> None:
    problem = problem_of(BILLION, machine_with(2))
    assert {rung.name for rung in RUNGS_BY_NAME.values() if TECHNIQUES[name].gets_into(rung, problem)} == rungs


@pytest.mark.parametrize(
    ("limit", "batch", "is_tried"), [(16 * GIB, 64, False), (7 * GIB, 64, True), (7 * GIB, 8, False), (GIB, 64, False)]
)
def test_gradients_are_divided_where_whole_ones_take_much_and_only_if_they_accumulate(
    limit: int, batch: int, is_tried: bool
) -> None:
    workload, machine = replace(BILLION, global_batch_size=batch), replace(machine_with(8), memory_limit=limit)
    rungs, techniques = [RUNGS_BY_NAME["fsdp2"]], [TECHNIQUES["divided-gradients"]]
    space, _ = space_on(workload, machine, rungs, (1, 2, 8), techniques=techniques)
    divided = [each for each in space.candidates if each.engine.has(techniques[0])]
    assert bool(divided) is is_tried
    assert all(each.accumulation > 1 for each in divided)
    for each in divided:
        assert space.predicted_peak(each) < space.predicted_peak(replace(each, engine=Engine(rungs[0])))


def test_of_two_techniques_in_one_slot_an_engine_has_one() -> None:
    techniques = [TECHNIQUES[name] for name in ("liger", "compile", "compile-whole", "fp8")]
    space, _ = space_on(BILLION, machine_with(2), tuple(RUNGS_BY_NAME.values()), (1,), techniques=techniques)
    names = {engine.name for engine in space.engines}
    assert {"ddp+liger+compile+fp8", "ddp+compile-whole", "fsdp2+cpu+compile", "zero1+liger"} <= names
    assert not {name for name in names if "compile+compile" in name}


def of_gpu(name: str) -> Problem:
    machine = machine_with(2)
    return problem_of(BILLION, replace(machine, gpus=tuple(replace(gpu, name=name) for gpu in machine.gpus)))


@pytest.mark.parametrize(
    ("name", "problem", "rung", "words"),
    [
        ("compile", of_gpu("NVIDIA H200"), "zero1", ".* --backend all or torch tries"),
        ("fp8", of_gpu("NVIDIA A100-SXM4-80GB"), "ddp", r"FP8 needs GPUs .* 8\.9 .*"),
        ("fp8", of_gpu("NVIDIA RTX A6000"), "ddp", r"FP8 needs GPUs .* 8\.9 .*"),
        ("fp8", of_gpu("Tesla V100-SXM2-32GB"), "ddp", r"FP8 needs GPUs .* 8\.9 .*"),
        ("adam-8bit", problem_for(BILLION, 2, "cpu"), "zero1", "moments in 8 bits are for GPUs"),
        ("unchecked-gradients", problem_for(replace(BILLION, dtype="fp16")), "zero1", ".*"),
    ],
)
def test_what_is_allowed_in_vain_is_refused(name: str, problem: Problem, rung: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"--allow {name} has no effect here: {words}"):
        require_effective_techniques([TECHNIQUES[name]], problem, [RUNGS_BY_NAME[rung]])
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA RTX 6000 Ada Generation", "NVIDIA B200"):
        useful = RUNGS_BY_NAME["ddp" if name in ("compile", "fp8") else "zero1"]
        require_effective_techniques([TECHNIQUES[name]], of_gpu(gpu), [useful])


ADAPTERS = replace(BILLION, lora=Lora(rank=8))


@pytest.mark.parametrize(
    ("name", "workload", "device", "words"),
    [
        ("liger", bundled_workload("opt-1.3b"), "cuda", "no kernels for opt as causal-lm"),
        ("liger", bundled_workload("roberta-base", task="masked-lm"), "cuda", "no kernels for roberta as masked-lm"),
        ("liger", BILLION, "cpu", "need a GPU"),
        ("fp8", BILLION, "cpu", "needs a GPU"),
        ("fp8", ADAPTERS, "cuda", "not beside frozen ones"),
        ("hpz", replace(ADAPTERS, load_in="4bit"), "cuda", "quantised"),
        ("hpz", script_workload(make_script()), "cuda", "scripts"),
    ],
)
def test_what_a_technique_cannot_train_is_refused_in_one_sentence(
    name: str, workload: Workload, device: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        require_usable(TECHNIQUES[name], workload, device)
    assert TECHNIQUES[name].refusal(BILLION, "cuda") == ""


@pytest.mark.parametrize("name", ["liger", "adam-8bit", "ulysses", "compile"])
def test_what_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.11.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = {
        "liger": "pip install liger-kernel",
        "adam-8bit": "`pip install bitsandbytes`",
        "ulysses": r"needs accelerate 1\.12 or later; 1\.11\.0 is installed",
        "compile": r"--allow compile needs a C\+\+ compiler",
    }
    with pytest.raises((EnvironmentFaultError, UsageError), match=words[name]):
        require_usable(TECHNIQUES[name], BILLION, "cuda")


# What training is told


def told(name: str) -> Answer:
    return answer(candidate=candidate_of(f"{name} mb=4", 32, 4))


@pytest.mark.parametrize(
    ("name", "arguments", "of_script"),
    [
        ("zero2+liger ckpt=on", {"use_liger_kernel": True}, "apply_liger_kernel(model, None)"),
        ("zero3+adam-8bit ckpt=on", {"optim": "adamw_bnb_8bit"}, "bitsandbytes.optim.AdamW8bit(…)"),
        (
            "zero3 ckpt=1/2",
            {"gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}},
            "every 2 layers (every_n_layers",
        ),
        (
            "zero3 ckpt=cpu",
            {"gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True}},
            "activations on the host (offload",
        ),
    ],
)
def test_the_trainer_s_arguments_and_the_launch_script_say_how_to_switch_it_on(
    name: str, arguments: dict[str, Any], of_script: str, tmp_path: Path
) -> None:
    config = tmp_path / "best_config.json"
    said = trainer_arguments(told(name), config)
    assert {each: said[each] for each in arguments} == arguments
    assert of_script in launch_script(told(name), OutputPaths.beside(config))
    assert of_script not in launch_script(answer(), OutputPaths.beside(config))


@pytest.mark.parametrize(
    ("name", "program", "settings"),
    [
        ("zero2+liger ckpt=on", "axolotl", {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}),
        ("zero2+liger ckpt=on", "llama-factory", {"enable_liger_kernel": True}),
        ("zero2+liger ckpt=on", "trl", {"use_liger_kernel": True}),
        ("zero3+adam-8bit ckpt=on", "axolotl", {"optimizer": "adamw_bnb_8bit"}),
        ("zero3+adam-8bit ckpt=on", "llama-factory", {"optim": "adamw_bnb_8bit"}),
        ("zero3+adam-8bit ckpt=on", "trl", {"optim": "adamw_bnb_8bit"}),
        (
            "zero3 ckpt=1/2",
            "axolotl",
            {"gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}},
        ),
        ("zero3 ckpt=1/2", "llama-factory", {"disable_gradient_checkpointing": False}),
        ("zero3 ckpt=cpu", "axolotl", {"gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}),
    ],
)
def test_other_programs_are_told_in_their_own_words(name: str, program: str, settings: dict[str, Any]) -> None:
    config = Path("best_config.json")
    said, usual = (yaml.safe_load(exported(best_config(each), config, program)) for each in (told(name), answer()))
    assert {each: said[each] for each in settings} == settings
    assert "1/2" in name or {each: usual.get(each) for each in settings} != settings


def test_a_program_without_a_setting_says_so() -> None:
    with pytest.raises(UsageError, match="--for llama-factory: it has no setting to keep activations"):
        exported(best_config(told("zero3 ckpt=cpu")), Path("best_config.json"), "llama-factory")
    assert "use --for accelerate or torchrun" in str(engine_named("fsdp2+hybrid=8").techniques[0].export("trainer"))


@pytest.mark.parametrize(
    ("name", "config", "arguments", "environment"),
    [
        (
            "ddp+compile",
            {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}},
            {"torch_compile": True},
            {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"},
        ),
        (
            "ddp+compile-whole",
            {"dynamo_config": {"dynamo_use_regional_compilation": False}},
            {"torch_compile": True},
            {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "false"},
        ),
        (
            "ddp+fp8",
            {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}},
            {"bf16": False},
            {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"},
        ),
        (
            "fsdp2+fp8",  # accelerate refuses both together
            {"fsdp_config": {"fsdp_cpu_ram_efficient_loading": False}},
            {"fsdp_config": {"cpu_ram_efficient_loading": False}},
            # safetensors cannot save such weights
            {"ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false"},
        ),
        (
            "fsdp2+hybrid=2",
            {
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": 2,
                    "parallelism_config_dp_shard_size": 2,
                }
            },
            {},
            {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        ),
        (
            "fsdp2+divided-gradients",
            {},
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            {},
        ),
    ],
)
def test_accelerate_its_variables_and_the_trainer_are_told_the_same(
    name: str, config: dict[str, Any], arguments: dict[str, Any], environment: dict[str, str]
) -> None:
    found = told(f"{name} ckpt=on")
    assert within(config, accelerate_config(found, found.run_dir))
    assert within(arguments, trainer_arguments(found, found.run_dir))
    assert within(environment, launch_environment(found))


def within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(name in whole and within(value, whole[name]) for name, value in part.items())
    return bool(part == whole)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("zero2", {}),
        ("zero2+bf16-states", {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),
        ("zero2+unchecked-gradients", {"check_grad_overflow": False}),
        ("zero2+adam-8bit", {}),
    ],
)
def test_deepspeed_s_own_configuration_says_how_states_are_kept_and_checked(name: str, bf16: dict[str, bool]) -> None:
    engine = engine_named(name)
    config = deepspeed_config(BILLION, engine, micro_batch=1, accumulation=1, world_size=1, nvme_path=None)
    assert config["bf16"] == {"enabled": True, **bf16}
    assert config.get("zero_allow_untested_optimizer", False) is ("8bit" in name)
