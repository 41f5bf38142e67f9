"""ladder in an environment of its own, and the training in the user's."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import Finished, ladder
from helpers.environments import OF_LADDER, OF_TRAINING, environment, installed
from helpers.scripts import SCRIPTS, files_in, folder_with_inputs

import ladder as package

pytestmark = pytest.mark.timeout(600)
SCRIPT = f"{SCRIPTS}/causal_trainer.py --model_name_or_path model --train_file text/train.jsonl --output_dir out "
SCRIPT += "--save_strategy no --max_steps"


@dataclass(frozen=True)
class Environments:
    """Interpreters."""

    of_ladder: Path
    of_training: Path
    without_deepspeed: Path


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    folder = tmp_path_factory.mktemp("environments")
    return Environments(
        environment(folder / "ladder", without=OF_TRAINING, also=str(Path(package.__file__).parents[1])),
        environment(
            folder / "training", without=("optuna", "nvidia-ml-py", "typer"), also=str(_another_ladder(folder))
        ),
        environment(folder / "torch alone", without=(*OF_LADDER[:-1], "deepspeed")),
    )


def _another_ladder(folder: Path) -> Path:
    """A folder with a package of that name, as an earlier release may lie in the user's environment."""
    (folder / "earlier" / "ladder").mkdir(parents=True)
    (folder / "earlier" / "ladder" / "__init__.py").write_text("raise RuntimeError('an earlier release')")
    return folder / "earlier"


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)


def run(environments: Environments, folder: Path, *words: str) -> Finished:
    return ladder(*words, folder=folder, python=str(environments.of_ladder))


def test_a_model_is_tuned_in_the_users_environment_which_stays_as_it_is(
    environments: Environments, tmp_path: Path
) -> None:
    packages = next(environments.of_training.parents[1].glob("lib/python*/site-packages"))
    before = sorted(each.name for each in packages.rglob("*"))
    options = ("--gpus", "0", "--rung", "zero1", "--micro-batch", "1", "--documented")
    done = run(environments, tmp_path, "tune", "tiny-llama", *options, "--python", str(environments.of_training))
    assert done.status == 0, done.errors
    first = done.errors.splitlines()[0]
    assert first.startswith(f"Ranks run in {environments.of_training}: Python 3.")
    assert ", torch " in first
    assert ", deepspeed " in first
    assert json.loads((tmp_path / "best_config.json").read_text())["ladder"]["rung"] == "zero1"
    assert sorted(each.name for each in packages.rglob("*")) == before


def test_without_deepspeed_a_script_is_tuned_for_ddp_and_trains_and_is_verified(
    environments: Environments, tmp_path: Path, script_inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    monkeypatch.setenv("VIRTUAL_ENV", str(environments.without_deepspeed.parents[1]))  # as an active one is found
    options = ("--gpus", "0", "--gpu-memory", "3GiB", "--micro-batch", "4", "--rung", "ddp", "--rung", "zero1", "--")
    done = run(environments, folder, "tune", *options, *f"{SCRIPT} 3".split())
    assert done.status == 0, done.errors
    assert "no deepspeed." in done.errors.splitlines()[0]
    assert "deepspeed is not installed; `pip install deepspeed`" in done.output
    assert json.loads((folder / "best_plain.json").read_text())["ladder"]["rung"] == "ddp"
    launch = (folder / "best_plain.launch.sh").read_text()
    assert f"exec {environments.without_deepspeed} -m torch.distributed.run " in launch.replace("'", "")
    started = run(environments, folder, "run", "best_plain.json", "--", *f"{SCRIPT} 6".split())
    assert started.status == 0, started.errors[-3000:]
    assert "6/6 [" in started.errors
    verified = run(environments, folder, "verify", "best_plain.json", "--tolerance", "0.9")
    assert verified.status == 0, verified.errors


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{folder}/python", "There is no interpreter {folder}/python; name one with --python."),
        ("{folder}/broken", "{folder}/broken cannot be run (no good); name another one with --python."),
        ("{folder}/chatty", "{folder}/chatty is no Python interpreter; name one with --python."),
        ("{ladder}", "{ladder} has no torch; install it there, or name another one with --python."),
    ],
)
def test_an_interpreter_that_cannot_train_is_refused_in_a_sentence(
    given: str, said: str, environments: Environments, tmp_path: Path
) -> None:
    for name, line in (("broken", "echo no good >&2; exit 3"), ("chatty", "echo hello")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    known = {"folder": tmp_path, "ladder": environments.of_ladder}
    done = run(environments, tmp_path, "tune", "tiny-llama", "--gpus", "0", "--python", given.format(**known))
    assert done.status == 4
    assert done.errors == f"ladder: {said.format(**known)}\n"


def test_two_environments_with_torch_are_named_and_none_is_chosen(
    environments: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(environments.of_training.parents[1]))
    monkeypatch.setenv("CONDA_PREFIX", str(environments.without_deepspeed.parents[1]))
    assert run(environments, tmp_path, "plan", "llama-2-7b", "--gpus", "8", "--gpu-memory", "40GiB").status == 0
    done = run(environments, tmp_path, "tune", "tiny-llama", "--gpus", "0")
    assert done.status == 4
    assert done.errors.startswith(f"ladder: Two environments have torch: {environments.of_training} (VIRTUAL_ENV) and ")
    monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.delenv("CONDA_PREFIX")
    done = run(environments, tmp_path, "tune", "tiny-llama", "--gpus", "0")
    assert done.status == 4
    assert "No torch was found for the training: activate its environment" in done.errors


OLDER = {
    "oldest": (
        "torch==2.6.0 transformers==4.51.3 accelerate==1.6.0 datasets==3.6.0 numpy setuptools wheel ninja py-cpuinfo",
        "--no-build-isolation deepspeed==0.16.9 ninja",
    ),
    "without deepspeed": ("torch==2.8.0 transformers==4.57.6 accelerate==1.10.1 datasets==3.6.0",),
}
LOOP = f"{SCRIPTS}/causal_loop.py --model_name_or_path model --train_file text/train.jsonl --output_dir out "
LOOP += "--num_train_epochs"


@pytest.mark.night
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OLDER)
def test_an_older_environment_trains_a_model_and_scripts_and_stays_as_it_is(
    name: str, environments: Environments, tmp_path: Path, script_inputs: Path
) -> None:
    python = installed(tmp_path / "environment", *OLDER[name])
    before = _installed_in(python)
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    done = run(environments, folder, "tune", "tiny-llama", "--gpus", "0", "--python", str(python))
    assert done.status == 0, done.errors
    for which, script, few, more in (("trainer", SCRIPT, 40, 3), ("loop", LOOP, 20, 1)):
        options = ("--gpus", "0", "--micro-batch", "4", "--python", str(python), "--output", f"{which}.json", "--")
        done = run(environments, folder, "tune", *options, *f"{script} {few}".split())
        assert done.status == 0, done.errors
        answer = f"{which}.json" if (folder / f"{which}.json").exists() else f"{which}.plain.json"
        started = run(environments, folder, "run", answer, "--python", str(python), "--", *f"{script} {more}".split())
        assert started.status == 0, started.errors[-3000:]
        assert (folder / "out" / "model.safetensors").exists()
        shutil.rmtree(folder / "out")
    assert _installed_in(python) == before


TOOLKIT = "llamafactory==0.9.5 deepspeed==0.19.8 torch==2.14.1 torchvision==0.29.1 torchaudio==2.11.1"
"""Its pins leave no place for this environment's transformers. torchaudio's wheels need a torch with CUDA."""
SFT = """\
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
template: default
dataset: pairs
dataset_dir: pairs
cutoff_len: 256
output_dir: out
save_strategy: "no"
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
max_steps: 12
"""


@pytest.mark.night
@pytest.mark.timeout(3600)
def test_a_toolkit_s_own_command_is_tuned_and_started_in_its_environment_which_stays_as_it_is(
    environments: Environments, tmp_path: Path, script_inputs: Path
) -> None:
    python = installed(tmp_path / "environment", TOOLKIT)
    before = _installed_in(python)
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    (folder / "sft.yaml").write_text(SFT)
    columns = {"prompt": "prompt", "response": "chosen"}
    described = {"pairs": {"file_name": "train.jsonl", "columns": columns}}
    (folder / "pairs" / "dataset_info.json").write_text(json.dumps(described))
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("of an earlier training")
    files = files_in(folder)
    options = ("--gpus", "0", "--gpu-memory", "3GiB", "--rung", "zero2", "--micro-batch", "2", "--python", str(python))
    done = run(environments, folder, "tune", *options, "--", "llamafactory-cli", "train", "sft.yaml")
    assert done.status == 0, done.errors
    assert ", transformers 5.6.0, accelerate 1.11.0, deepspeed 0.19.8." in done.errors.splitlines()[0]
    assert files_in(folder) == files
    assert "exec ladder" not in (folder / "best_config.launch.sh").read_text(), "in the toolkit's own words"
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(["bash", "best_config.launch.sh"], cwd=folder, env=bare, check=True, timeout=600)
    assert json.loads((folder / "out" / "trainer_state.json").read_text())["global_step"] == 12
    assert (folder / "out" / "model.safetensors").exists()
    assert _installed_in(python) == before


def _installed_in(python: Path) -> str:
    return subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
