"""`ladder export`: one answer in eight programs' words, each with the same batch, length and precision."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ladder.cli.export import Target
from ladder.cli.main import main
from ladder.emit.config import load_best_config
from ladder.emit.export import EXPORTS, exported


@pytest.fixture(scope="module")
def config(simulated_run: Path) -> Path:
    return simulated_run.parent / "best_config.json"


@pytest.fixture(scope="module")
def document(config: Path) -> dict[str, Any]:
    return load_best_config(config)


def test_the_command_knows_every_export() -> None:
    assert {target.value for target in Target} == set(EXPORTS)


def test_the_trainer_and_accelerate_get_what_the_tune_wrote_beside_the_answer(
    config: Path, document: dict[str, Any]
) -> None:
    assert exported(document, config, "trainer") == config.with_name("best_config.trainer.json").read_text()
    assert exported(document, config, "accelerate") == config.with_name("best_config.accelerate.yaml").read_text()


def test_deepspeed_gets_its_own_keys_alone(config: Path, document: dict[str, Any]) -> None:
    assert json.loads(exported(document, config, "deepspeed")) == {k: v for k, v in document.items() if k != "ladder"}


# The programs' own names for it: their schemas, as published.
NAMES = {
    "axolotl": {
        "batch": "micro_batch_size",
        "length": "sequence_len",
        "model": "base_model",
        "optimizer": "optimizer",
    },
    "llama-factory": {"batch": "per_device_train_batch_size", "length": "cutoff_len", "model": "model_name_or_path"},
    "trl": {"batch": "per_device_train_batch_size", "length": "max_length", "model": "model_name_or_path"},
}


@pytest.mark.parametrize("target", NAMES)
def test_every_program_trains_the_same(target: str, config: Path, document: dict[str, Any]) -> None:
    fragment, names, answer = yaml.safe_load(exported(document, config, target)), NAMES[target], document["ladder"]
    assert fragment[names["batch"]] == answer["micro_batch"]
    assert fragment[names["length"]] == answer["workload"]["seq_len"]
    assert fragment[names["model"]] == answer["model"]["name"]
    assert fragment["gradient_accumulation_steps"] == answer["accumulation"]
    assert fragment[answer["workload"]["dtype"]] is True
    assert fragment["max_grad_norm"] == answer["workload"]["gradient_clipping"]
    assert fragment[names.get("optimizer", "optim")] == "adamw_torch_fused"


@pytest.mark.parametrize("on", [True, False])
def test_checkpointing_is_switched_by_each_program_s_own_name(on: bool, config: Path, document: dict[str, Any]) -> None:
    answer = {**document, "ladder": {**document["ladder"], "checkpoint_every": int(on)}}
    factory, axolotl = (yaml.safe_load(exported(answer, config, name)) for name in ("llama-factory", "axolotl"))
    assert factory["disable_gradient_checkpointing"] is not on
    assert "gradient_checkpointing" not in factory
    assert factory.get("use_reentrant_gc", True) is not on
    assert axolotl["gradient_checkpointing"] is on
    assert ("gradient_checkpointing_kwargs" in axolotl) is on


def test_deepspeed_is_named_once_in_what_trl_gets(config: Path, document: dict[str, Any]) -> None:
    fragment = yaml.safe_load(exported(document, config, "trl"))
    assert "deepspeed" not in fragment
    assert Path(fragment["accelerate_config"]).is_file()


@pytest.mark.parametrize("target", ["torchrun", "sbatch"])
def test_the_scripts_are_bash_and_run_the_script_they_are_given(
    target: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.sh"
    assert main(["export", str(config), "--for", target, "--output", str(script)]) == 0
    for program in ("torchrun", "srun"):  # print what they are asked to do
        (tmp_path / program).write_text('#!/bin/sh\necho "$(basename "$0")" "$OMP_NUM_THREADS" "$@"\n')
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [str(script), "my train.py", "--lr", "1"], check=True, capture_output=True, text=True, env=environment
    )
    words = done.stdout.split()
    assert words[0] == {"torchrun": "torchrun", "sbatch": "srun"}[target]
    assert words[words.index("--nproc_per_node") + 1] == "8"
    assert "my train.py --lr 1 --deepspeed" in done.stdout
    assert words[1] == "16"


def test_sbatch_asks_for_the_gpus_and_cores_that_were_measured(config: Path, document: dict[str, Any]) -> None:
    text = exported(document, config, "sbatch")
    asked = dict(line.removeprefix("#SBATCH --").split("=") for line in text.splitlines() if line.startswith("#SBATCH"))
    assert asked["gpus-per-node"] == "8"
    assert int(asked["cpus-per-task"]) == 8 * int(document["ladder"]["environment"]["OMP_NUM_THREADS"])
    assert shlex.split(text.splitlines()[-1])[0] == "srun"


def test_a_file_that_was_edited_is_not_exported(
    config: Path, document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "best_config.json"
    edited.write_text(json.dumps({**document, "gradient_clipping": 7}))
    assert main(["export", str(edited)]) == 2
    assert "changed after ladder wrote it" in capsys.readouterr().err
