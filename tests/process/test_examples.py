"""The examples: those that train with emitted files are run by test_emitted_files.py, the others here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import typer
from helpers import ladder
from helpers.programs import program
from reference_words import SCRIPT_KEYS

from ladder.cli.main import app

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_notebook_runs_and_leaves_an_answer(tmp_path: Path) -> None:
    done = program(sys.executable, str(EXAMPLES / "notebook.py"), folder=tmp_path)
    assert "on a100-40" in done.stdout
    assert (tmp_path / "best_config.json").exists()


def test_bash_and_ladder_take_the_job(tmp_path: Path) -> None:
    job = EXAMPLES / "train.sbatch"
    program("bash", "-n", str(job))
    (tune,) = re.findall(r"^ *ladder (tune .*)$", job.read_text("utf-8"), re.MULTILINE)
    command, *options = shlex.split(tune)
    typer.main.get_command(app).commands[command].make_context(command, options)  # type: ignore[attr-defined]


def test_the_table_lists_every_example() -> None:
    listed = set(re.findall(r"^\| \[([^\]]+)\]", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md", "tiny.py"}


@pytest.mark.night  # two minutes; tests/process/test_own_script.py has one of each way to train
def test_the_script_of_one_s_own_is_tuned_and_run_unchanged(tmp_path: Path, trial_environment: dict[str, str]) -> None:
    shutil.copy(EXAMPLES / "own_script.py", tmp_path)
    tune = ["tune", "--gpus", "0", "--gpu-memory", "4GiB", "--rung", "zero2", "--micro-batch", "8"]
    done = ladder(*tune, "--", "own_script.py", "--lr", "1e-3", folder=tmp_path)
    assert done.status == 0, done.errors
    assert not (tmp_path / "trained").exists()  # a trial writes nothing of the script's
    section = json.loads((tmp_path / "best_config.json").read_text())["ladder"]
    # what the reference page says; only trainers that generate, and loops, have these two
    assert {*section["script"], "generation_batch_size", "options"} == {*SCRIPT_KEYS}
    assert section["script"]["command"] == ["own_script.py", "--lr", "1e-3"]
    assert section["workload"]["global_batch_size"] == 32
    done = ladder("run", "best_config.json", "--", "own_script.py", "--steps", "4", folder=tmp_path)
    assert done.status == 0, done.errors
    assert "Loss on held-out samples" in done.output
    assert (tmp_path / "trained" / "checkpoint-4").is_dir()
