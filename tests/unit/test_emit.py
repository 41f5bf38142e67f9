"""The shape of the emitted files. That the programs they are for accept them is tests/process/test_emitted_files.py."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.answers import AWKWARD, MEASUREMENT, answer

import ladder.emit.config as config_module
from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.emit import (
    Answer,
    OutputPaths,
    best_config,
    emit_all,
    launch_environment,
    launch_script,
    load_best_config,
    original_text,
    trainer_arguments,
)
from ladder.emit.exporters.registry import exported
from ladder.emit.files import write_atomically
from ladder.emit.trainer import least_transformers
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.machine.host import MALLOC_OF_A_CPU_RANK, environment_of_a_cpu_rank
from ladder.options.checks import require_effective_options
from ladder.options.tune import TuneOptions
from ladder.units import GIB

# The answer


def test_an_answer_that_changes_the_global_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="has 32 sequences per step, but the workload has 64"):
        answer(workload={"global_batch_size": 64})


@pytest.mark.parametrize("field", ["world_size", "memory_limit", "host_threads", "tokens_per_second"])
def test_an_answer_without_a_positive_count_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be above zero"):
        answer("zero3", **{field: 0})


# best_config.json


def test_the_configuration_is_deepspeed_s_own_plus_one_section() -> None:
    document = best_config(answer())
    section = document.pop("ladder")
    assert document == deepspeed_config(
        answer().workload,
        Engine(RUNGS_BY_NAME["zero3"]),
        micro_batch=4,
        accumulation=2,
        world_size=4,
        nvme_path=None,
    )
    assert section["memory_per_gpu"]["limit_bytes"] == 40 * GIB
    assert section["headroom"] == pytest.approx(5 / 40)
    assert section["joules_per_token"] == pytest.approx(2_000 / 32_768, rel=1e-4)
    assert json.loads(json.dumps(section)) == section
    unknown = answer(
        gpu_name=None,
        measurement=dataclasses.replace(MEASUREMENT, watts=None),
        versions={"flash.attn": "2"},  # accelerate splits keys at a dot
        proof={"losses": [1.0, float("nan"), float("inf")]},
    )
    section = best_config(unknown)["ladder"]
    assert section["gpu"] is section["joules_per_token"] is None
    assert section["versions"] == {"flash_attn": "2"}
    assert section["proof"] == {"losses": [1.0, None, None]}


def test_no_leaf_is_auto_whatever_the_texts_and_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = answer(
        "zero3+param-nvme+opt-nvme",
        shape={"name": "auto", "source": "folder", "model_type": "auto"},
        gpu_name="auto",
        nvme_path=Path("auto"),
        versions={"torch": "auto"},
        run_dir=Path("auto"),
        proof={"note": "auto", "list": ["auto", ("auto",)], "path": Path("auto")},
        warnings=("auto",),
    )
    paths = emit_all(hostile, Path("auto"))
    document = load_best_config(paths[0])
    assert not any('"auto"' in path.read_text() for path in paths[:2])
    assert document["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path / "auto")
    assert original_text(document["ladder"]["model"]["name"]) == "auto"


@pytest.mark.parametrize("name", ["auto", "\\auto", "\\\\auto", "automatic", "\\", "org/auto", "Auto", ""])
def test_a_name_can_be_read_back_as_it_was(name: str) -> None:
    written = best_config(answer(shape={"name": name}))["ladder"]["model"]["name"]
    assert original_text(written) == name
    assert (written == name) == (not name.endswith("auto") or name == "org/auto")


# Reading it again


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return emit_all(answer(), tmp_path / "best_config.json")[0]


def test_an_untouched_file_is_read_back_whole_even_if_it_was_laid_out_anew(written: Path) -> None:
    assert load_best_config(written) == best_config(answer())
    written.write_text(json.dumps(json.loads(written.read_text()), sort_keys=True))
    assert load_best_config(written) == best_config(answer())


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [(None, "train_micro_batch_size_per_gpu", 8), ("zero_optimization", "stage", 2), ("ladder", "headroom", 0.5)],
)
def test_a_file_changed_by_hand_is_refused(written: Path, section: str | None, key: str, value: Any) -> None:
    document = json.loads(written.read_text())
    (document if section is None else document[section])[key] = value
    written.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="was changed after ladder wrote it"):
        load_best_config(written)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("schema_version",), 2),
        (("rung",), "zero9"),
        (("engine",), "zero3+superglue"),
        (("checkpoint_every",), 4),
        (("workload", "optimizer"), "muon"),
        (("workload",), "as usual"),
        (("rung",), None),
    ],
    ids=str,
)
def test_what_this_version_does_not_try_asks_for_a_newer_ladder(
    written: Path, where: tuple[str, ...], value: Any
) -> None:
    document = json.loads(written.read_text())
    *folders, name = where
    section = document["ladder"]
    for folder in folders:
        section = section[folder]
    section[name] = value
    document["ladder"]["digest"] = config_module._digest(document)
    written.write_text(json.dumps(document))
    schema = r" \(schema 2, but this version reads up to 1\)" if name == "schema_version" else ""
    with pytest.raises(UsageError, match=f"was written by a newer ladder{schema}"):
        load_best_config(written)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"", "is not JSON"),
        (b"[]", "was not written by ladder"),
        (b'{"zero_optimization": {"stage": 2}}', "was not written by ladder"),
        (b'{"ladder": "yes"}', "was not written by ladder"),
        (b'{"ladder": {"schema_version": true}}', "was not written by ladder"),
        (b'{"ladder": {"schema_version": 1}}', "was changed after ladder wrote it"),
        (b"[" * 200_000, "it is nested too deeply"),
    ],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=complaint):
        load_best_config(path)
    with pytest.raises(UsageError, match=r"none\.json' does not exist"):
        load_best_config(tmp_path / "none.json")
    with pytest.raises(UsageError, match="Cannot read"):
        load_best_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "source", "folder"),
    [
        ("models/mine", "folder", "models/mine"),
        ("models/mine/config.json", "file", "models/mine"),
        ("models/shape.json", "file", None),
        ("org/model", "hub", None),
        ("llama-2-7b", "bundled", None),
    ],
)
def test_the_section_says_where_the_model_lies_from_any_folder(
    name: str, source: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = best_config(answer(shape={"name": name, "source": source}))["ladder"]["model"]["folder"]
    assert said == (None if folder is None else str(tmp_path / folder))


# The Trainer's arguments


def test_the_arguments_repeat_what_must_agree_and_say_what_the_configuration_cannot() -> None:
    assert trainer_arguments(answer(), Path("/out/best_config.json")) == {
        "deepspeed": "/out/best_config.json",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": True,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
    }


def test_what_is_off_is_said_so_without_settings() -> None:
    off = dataclasses.replace(answer().candidate, checkpoint_every=0)
    changed = answer(candidate=off, workload={"dtype": "fp16", "optimizer": "sgd"}, device="cpu", gpu_name=None)
    arguments = trainer_arguments(changed, Path("c.json"))
    assert arguments["gradient_checkpointing"] is False
    assert arguments["fp16"] is arguments["use_cpu"] is True
    assert arguments["optim"] == "sgd"
    assert not {"gradient_checkpointing_kwargs", "bf16"} & set(arguments)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("5.22.0", "gradient_checkpointing"),
        ("5.23.0", "activation_checkpointing"),
        ("not installed", "gradient_checkpointing"),
    ],
)
def test_checkpointing_has_the_name_that_the_measured_transformers_knows_without_a_warning(
    version: str, name: str
) -> None:
    arguments = trainer_arguments(answer(versions={"transformers": version}), Path("c.json"))
    said = {key: value for key, value in arguments.items() if "checkpointing" in key}
    assert said == {name: True, f"{name}_kwargs": {"use_reentrant": False}}


@pytest.mark.parametrize(
    ("version", "every", "least"),
    [
        ("5.18.0", 2, "5.18"),
        ("5.22.0", 1, ""),
        ("5.23.0", 0, "5.23"),
        ("", 2, "5.18"),
    ],
)
def test_the_launch_script_says_which_transformers_the_trainer_s_arguments_need(
    version: str, every: int, least: str, tmp_path: Path
) -> None:
    candidate = dataclasses.replace(answer().candidate, checkpoint_every=every)
    found = answer(candidate=candidate, versions={"transformers": version})
    assert least_transformers(found) == least
    script = launch_script(found, OutputPaths.beside(tmp_path / "best_config.json"))
    assert (f"# They need transformers {least} or later; tune again" in script) is bool(least)


# accelerate's YAML and the launch script


def test_the_environment_gives_a_rank_the_threads_and_the_allocator_it_was_measured_with() -> None:
    assert launch_environment(answer()) == {"OMP_NUM_THREADS": "4", **answer().allocator}
    on_cpu = {"OMP_NUM_THREADS": "4", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert launch_environment(answer(device="cpu")) == on_cpu | environment_of_a_cpu_rank({})


@pytest.mark.parametrize(
    "name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"]
)
def test_a_user_s_own_size_of_a_cache_of_kernels_stays_in_trials_and_in_the_answer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "7")
    assert environment_of_a_cpu_rank({name: "7"}).items() >= {**MALLOC_OF_A_CPU_RANK, name: "7"}.items()
    emitted = launch_environment(answer(device="cpu"))
    caches = {key: value for key, value in emitted.items() if key.endswith("CACHE_CAPACITY")}
    assert len(caches) == 2
    assert caches[name] == "7"


def test_a_line_break_in_a_name_or_a_warning_stays_inside_the_comment(tmp_path: Path) -> None:
    warnings = ("simulated on paper\nrm -rf /", "thin headroom")
    hostile = answer(shape={"name": "a\nexit 9\nb"}, gpu_name="c\nexit 9", warnings=warnings)
    script = launch_script(hostile, OutputPaths.beside(tmp_path / "d\nexit 9\n" / "best_config.json"))
    commands = [line for line in script.split("set -euo pipefail")[0].split("\n") if line and line[0] != "#"]
    assert commands == []
    assert "\n# Warning: simulated on paper\n# rm -rf /.\n# Warning: thin headroom.\n" in script


AT_ONCE = Candidate(Engine(RUNGS_BY_NAME["zero3"]), checkpoint_every=1, micro_batch=8, accumulation=1)


@pytest.mark.parametrize(
    ("said", "of", "not_of"),
    [
        ("DeepSpeedCPUAdam(…, adamw_mode=True)", answer("zero2+opt-cpu"), answer("zero3")),
        (
            "DeepSpeedCPUAdam(…, adamw_mode=False)",
            answer("zero3+opt-cpu", workload={"optimizer": "adam"}),
            answer("zero2+opt-cpu", workload={"optimizer": "sgd"}),
        ),
        ("# Its DataLoader must give batches of 8: accelerate takes those, whatever", answer(candidate=AT_ONCE), None),
        ("with accelerator.accumulate(model):", answer(), answer(candidate=AT_ONCE)),
        ("fused=True", answer(), answer("zero2", workload={"optimizer": "sgd"})),
        ("fused=True", answer(workload={"optimizer": "adam"}), None),
        ("deepspeed.init_distributed()", answer("zero3"), answer("zero2")),
        ("PartialState(cpu=True)", answer(device="cpu"), answer()),
    ],
    ids=["offloaded AdamW", "offloaded Adam", "batches", "accumulation", "AdamW", "Adam", "shards", "CPU"],
)
def test_the_launch_script_says_what_a_script_has_to_do_for_this_answer_and_for_no_other(
    said: str, of: Answer, not_of: Answer | None
) -> None:
    paths = OutputPaths.beside(Path("c.json"))
    assert said in launch_script(of, paths)
    assert not_of is None or said not in launch_script(not_of, paths)


# Writing


@pytest.mark.parametrize(
    ("name", "stem"), [("fast.json", "fast"), ("llama-2.7b", "llama-2.7b"), ("llama-2.13b.json", "llama-2.13b")]
)
def test_all_files_stand_beside_the_configuration_under_its_stem(name: str, stem: str, tmp_path: Path) -> None:
    paths = emit_all(answer(), tmp_path / "new" / name)
    assert [path.name for path in paths[1:]] == [
        f"{stem}.{end}" for end in ("trainer.json", "accelerate.yaml", "launch.sh")
    ]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    assert os.access(paths[3], os.X_OK)
    assert not os.access(paths[0], os.X_OK)


def test_the_files_refer_to_each_other_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, trainer, accelerate, _ = emit_all(answer(), Path(AWKWARD) / ".." / AWKWARD / "best_config.json")
    assert config == tmp_path / AWKWARD / "best_config.json"
    assert json.loads(trainer.read_text())["deepspeed"] == str(config)
    assert yaml.safe_load(accelerate.read_text())["deepspeed_config"]["deepspeed_config_file"] == str(config)


def test_the_configuration_is_ascii_so_that_no_locale_can_misread_it(tmp_path: Path) -> None:
    config = emit_all(answer(shape={"name": "modèle"}), tmp_path / "c.json")[0]
    assert config.read_bytes().isascii()
    assert load_best_config(config)["ladder"]["model"]["name"] == "modèle"


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = emit_all(answer(), tmp_path / "best_config.json")[0]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(EnvironmentFaultError, match=r"best_config\.json': No space left on device"):
        emit_all(answer("zero2"), config)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_write_through_a_link_that_fails_keeps_the_old_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "page.html").write_text("old")
    (tmp_path / "page.html").symlink_to("kept/page.html")
    write_atomically(tmp_path / "page.html", "new")
    assert (tmp_path / "kept" / "page.html").read_text() == "new"

    def no_renaming(old: Path, new: Path) -> None:
        assert Path(old).parent == Path(new).parent == tmp_path / "kept"  # within one file system
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", no_renaming)
    with pytest.raises(EnvironmentFaultError, match="Cannot write"):
        write_atomically(tmp_path / "page.html", "newer")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["page.html"]
    assert (tmp_path / "kept" / "page.html").read_text() == "new"
    assert (tmp_path / "page.html").is_symlink()


def test_an_output_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        emit_all(answer(), tmp_path)
    with pytest.raises(UsageError, match="does not name a file"):
        emit_all(answer(), Path(""))
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFaultError, match="Cannot write"):
        emit_all(answer(), tmp_path / "file" / "best_config.json")


@pytest.mark.parametrize(
    ("rung", "optimizer", "section"),
    [
        ("zero2", "adamw", {"type": "AdamW", "torch_adam": True, "fused": True}),
        ("zero2+opt-cpu", "adamw", {"type": "AdamW"}),
        ("zero2", "adam", {"type": "Adam", "adam_w_mode": False, "torch_adam": True, "fused": True}),
    ],
)
def test_an_optimizer_that_was_asked_for_is_that_of_the_trials(
    rung: str, optimizer: str, section: dict[str, Any]
) -> None:
    asked = answer(rung, workload={"optimizer": optimizer}, learning_rate=2e-5)
    written = best_config(asked)["optimizer"]
    usual = {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert {"type": written["type"], **written["params"]} == {**section, **usual}
    arguments = trainer_arguments(asked, Path("best_config.json"))
    assert (arguments["learning_rate"], arguments["optim"]) == (2e-5, "adamw_torch_fused")
    assert ("weight_decay" in arguments) is (optimizer == "adam")
    assert "optimizer" not in best_config(answer(rung, workload={"optimizer": optimizer}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (TuneOptions(script=("train.py",), with_optimizer=1e-5), "a script, which keeps its own optimizer"),
        (TuneOptions(model="x", allow=("adam-8bit",), with_optimizer=1e-5), "an optimizer that only a script can make"),
    ],
)
def test_an_optimizer_that_cannot_be_written_is_refused_before_the_tune(options: TuneOptions, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        require_effective_options(options)


# What a batch job asks for of its host: more than the trials held, since training loads data beside.


def asked_gib(peak_host: int) -> int:
    document = best_config(answer(measurement=replace(MEASUREMENT, peak_host=peak_host)))
    (asked,) = re.findall(r"^#SBATCH --mem=(\d+)G$", exported(document, Path("best_config.json"), "sbatch"), re.M)
    return int(asked)


def test_a_job_asks_for_a_tenth_more_than_was_held_and_for_room_for_the_data_loaders_of_each_rank() -> None:
    ranks = answer().world_size
    assert asked_gib(200 * GIB) - asked_gib(100 * GIB) == 110
    assert asked_gib(100 * GIB) >= 110 + 2 * ranks
