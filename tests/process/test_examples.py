"""The examples: those that train are run by test_emitted_files.py, the others here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ladder.cli.main import app

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_notebook_runs_and_leaves_an_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "notebook.py")],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "on a100-40" in done.stdout
    assert (tmp_path / "best_config.json").exists()


def test_bash_and_ladder_take_the_job(tmp_path: Path) -> None:
    job = EXAMPLES / "train.sbatch"
    subprocess.run(["bash", "-n", str(job)], check=True, timeout=30)
    (tune,) = re.findall(r"^ *ladder (tune .*)$", job.read_text("utf-8"), re.MULTILINE)
    command, *options = shlex.split(tune)
    typer.main.get_command(app).commands[command].make_context(command, options)  # type: ignore[attr-defined]


def test_the_table_lists_every_example() -> None:
    listed = set(re.findall(r"^\| \[([^\]]+)\]", (EXAMPLES / "README.md").read_text("utf-8"), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md", "tiny.py"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_script_says_what_it_is(path: Path) -> None:
    assert path.read_text("utf-8").startswith('"""')
