"""`ladder sbatch` and `srun ladder` in a real Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import wait_until

if TYPE_CHECKING:
    from helpers.clusters import Slurm

SIMULATED = ("--launcher", "simulated", "--machine", "a100-80")
LONG = ("llama-2-7b", *SIMULATED, "--strategy", "exhaustive", "--knobs", "10")
"""A tune of several seconds, so that it can be stopped in the middle."""


def written(slurm: Slurm, folder: Path, *options: str) -> str:
    """The job's number, submitted in `folder`, whose run folder is `run`."""
    words = ("ladder", "sbatch", *options, "--run-dir", "run", "--job-file", "tune.sbatch")
    done = slurm.run(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    return slurm.submit("tune.sbatch", folder=folder)


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.out"))


def in_the_middle(slurm: Slurm, folder: Path, job: str) -> bytes:
    """Wait until the job's tune has measured something; returns its history so far."""
    journal = folder / "run" / "journal.log"
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 10)
    assert slurm.job(job)["JobState"] == "RUNNING", output(folder)
    return journal.read_bytes()


def test_the_written_job_tunes_to_its_end(slurm: Slurm, tmp_path: Path) -> None:
    job = written(slurm, tmp_path, "tiny-llama", *SIMULATED, "--partition", "all", "--time", "00:30:00")
    ended = slurm.wait_for(job)
    assert (ended["JobState"], ended["TimeLimit"]) == ("COMPLETED", "00:30:00"), output(tmp_path)
    assert json.loads((tmp_path / "best_config.json").read_text())["ladder"]


@pytest.mark.parametrize(
    "again",
    [
        # What `--signal=B:TERM@120` does two minutes before the end; Slurm's clock of time limits counts in minutes.
        ("scancel", "--batch", "--signal=TERM"),
        pytest.param(("scontrol", "requeue"), marks=pytest.mark.night),
    ],
)
def test_a_job_without_time_left_or_that_somebody_queues_again_goes_on(
    slurm: Slurm, tmp_path: Path, again: tuple[str, ...]
) -> None:
    job = written(slurm, tmp_path, *LONG)
    history = in_the_middle(slurm, tmp_path, job)
    slurm.run(*again, job, folder=tmp_path)
    slurm.wait_for(job, "PENDING")
    assert slurm.wait_for(job, "COMPLETED", "FAILED")["Restarts"] == "1", output(tmp_path)
    assert (tmp_path / "best_config.json").exists(), output(tmp_path)
    assert (tmp_path / "run" / "journal.log").read_bytes().startswith(history)
    assert "Continuing: " in output(tmp_path), output(tmp_path)


@pytest.mark.night
@pytest.mark.timeout(900)
def test_a_job_whose_time_is_nearly_up_is_told_by_slurm_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """The real `--signal=B:TERM@120`, in a tune whose trials are real: it takes longer than the job's three minutes."""
    real = ("--gpus", "0", "--backend", "deepspeed", "--strategy", "exhaustive", "--seq-len", "512")
    job = written(slurm, tmp_path, "tiny-llama", *real, "--gpu-memory", "1GiB", "--time", "00:03:00")
    slurm.wait_for(job, "PENDING", "RUNNING")
    slurm.wait_for(job, "RUNNING")
    told = slurm.wait_for(job, "PENDING", "COMPLETED", "FAILED", "TIMEOUT", seconds=240)
    assert (told["JobState"], told["Restarts"]) == ("PENDING", "1"), output(tmp_path)
    history = (tmp_path / "run" / "journal.log").read_bytes()
    slurm.wait_for(job, "RUNNING")
    wait_until(lambda: "Continuing: " in output(tmp_path), 60)
    slurm.run("scancel", job, folder=tmp_path)
    assert slurm.wait_for(job)["JobState"] == "CANCELLED"
    assert (tmp_path / "run" / "journal.log").read_bytes().startswith(history)


def test_a_job_that_somebody_cancels_stays_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    job = written(slurm, tmp_path, *LONG)
    in_the_middle(slurm, tmp_path, job)
    slurm.run("scancel", job, folder=tmp_path)
    wait_until(lambda: not slurm.run("squeue", "--noheader", folder=tmp_path).stdout.strip())
    ended = slurm.job(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), output(tmp_path)


def test_a_job_queues_itself_only_so_often(slurm: Slurm, tmp_path: Path) -> None:
    job = written(slurm, tmp_path, *LONG, "--requeues", "0")
    in_the_middle(slurm, tmp_path, job)
    slurm.run("scancel", "--batch", "--signal=TERM", job, folder=tmp_path)
    ended = slurm.wait_for(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "143:0"), output(tmp_path)
    assert "submit the job again" in output(tmp_path)


def test_of_four_copies_under_srun_one_works(slurm: Slurm, tmp_path: Path) -> None:
    words = ("ladder", "tune", "tiny-llama", *SIMULATED, "--run-dir", "run")
    done = slurm.run("srun", "--ntasks=4", "--kill-on-bad-exit=1", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ladder starts the ranks itself") == 3
    assert done.stdout.count("best_config.json") >= 1
    assert (tmp_path / "best_config.json").exists()


def test_a_tune_works_in_the_batch_script_of_a_job_with_four_tasks(slurm: Slurm, tmp_path: Path) -> None:
    words = " ".join(("ladder", "tune", "tiny-llama", *SIMULATED, "--run-dir", "run"))
    job = slurm.submit("--ntasks=4", f"--wrap={words}", folder=tmp_path)
    assert slurm.wait_for(job)["JobState"] == "COMPLETED", output(tmp_path)
    assert (tmp_path / "best_config.json").exists()
