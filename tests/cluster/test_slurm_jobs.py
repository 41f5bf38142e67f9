"""Tunes whose trials run in Slurm jobs that ladder submits itself, in a real Slurm with two nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import wait_until
from helpers.clusters import Slurm

from ladder.emit import load_best_config

pytest.importorskip("submitit", reason="submitit is not installed (pip install 'oom-ladder[slurm-jobs]')")
pytestmark = pytest.mark.cluster
LADDER = [sys.executable, "-m", "ladder.cli.main"]
TUNE = [
    *(*LADDER, "tune", "tiny-llama", "--launcher", "slurm-jobs", "--nodes", "2", "--gpus", "0", "--cpus-per-task", "2"),
    *("--backend", "deepspeed", "--quiet", "--run-dir", "run"),
]
Check = Callable[[], None]


def jobs(slurm: Slurm) -> list[tuple[str, str]]:
    """The number and state of each job that is not over."""
    listed = slurm.run("squeue", "--noheader", "--format=%i %T", folder=slurm.folder).stdout.split()
    return list(zip(listed[::2], listed[1::2], strict=True))


def begun(slurm: Slurm, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """A tune in the background."""
    with (folder / "out.txt").open("wb") as out:
        return subprocess.Popen(
            [*TUNE, *options], cwd=folder, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )


def in_a_trial(folder: Path) -> None:
    """Wait for the first step of any trial."""
    wait_until(lambda: any("step" in file.read_text() for file in (folder / "run").glob("trials/*/rank1.jsonl")), 120)


def no_job_is_left(slurm: Slurm) -> None:
    wait_until(lambda: not jobs(slurm), 20)


def test_a_tune_in_one_job_is_proven_and_leaves_none(slurm: Slurm, tmp_path: Path, leaves_nothing: Check) -> None:
    done = slurm.run(*TUNE, "--time-budget", "10s", folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    section = load_best_config(tmp_path / "best_config.json")["ladder"]
    assert (section["num_nodes"], section["world_size"]) == (2, 2)
    no_job_is_left(slurm)
    leaves_nothing()
