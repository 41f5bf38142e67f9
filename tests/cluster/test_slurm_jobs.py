"""Tunes whose trials run in Slurm jobs that ladder submits itself, in a real Slurm with two nodes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from helpers import Bench, tiny_trial, wait_until
from helpers.clusters import LADDER, Slurm

from ladder.emit import load_best_config
from ladder.launch.jobs import files
from ladder.launch.jobs.launcher import JobsLauncher
from ladder.launch.watch import now

pytest.importorskip("submitit", reason="submitit is not installed (pip install 'oom-ladder[slurm-jobs]')")
TUNE = [
    *(*LADDER, "tune", "tiny-llama", "--launcher", "slurm-jobs", "--gpus", "0", "--cpus-per-task", "2"),
    *("--backend", "deepspeed", "--run-dir", "run"),
]
ON_TWO = ["--nodes", "2"]
LONG = ["--strategy", "exhaustive", "--seq-len", "512", "--gpu-memory", "1GiB"]
"""A tune of several minutes."""
_LIMIT_SECONDS = 120
"""Slurm counts limits in minutes, and looks twice a minute whether a job's time is up."""
Check = Callable[[], None]


def jobs_in_queue(slurm: Slurm) -> list[str]:
    """The state of each job that is not over."""
    return slurm.run("squeue", "--noheader", "--format=%T", folder=slurm.folder).stdout.split()


def job_of(slurm: Slurm) -> str:
    """The number of the only job."""
    (number,) = slurm.run("squeue", "--noheader", "--format=%i", folder=slurm.folder).stdout.split()
    return number


@contextmanager
def begun(slurm: Slurm, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A tune in the background, which is over at the end of the block."""
    tune = slurm.begin(*TUNE, *ON_TWO, *LONG, folder=folder)
    try:
        yield tune
    finally:
        tune.kill()
        tune.wait()


def trials(folder: Path) -> list[Path]:
    """In their order."""
    return sorted((folder / "run" / "trials").glob("*"))


def wait_for_a_step(folder: Path, after: int = 0) -> None:
    """Of a trial that follows the first `after` ones."""

    def came() -> bool:
        events = [trial / "rank1.jsonl" for trial in trials(folder)[after:]]
        return any(file.exists() and '"step"' in file.read_text() for file in events)

    wait_until(came, 200)


def said(folder: Path) -> str:
    return (folder / "out.txt").read_text()


def require_no_job(slurm: Slurm) -> None:
    """All of them end within the ten seconds that a keeper gives a job to end by itself, and a few for Slurm."""
    wait_until(lambda: jobs_in_queue(slurm) == [], 20)


@pytest.mark.parametrize(
    "each", [[], pytest.param(["--trials-per-job", "1", "--queued-jobs", "2"], marks=pytest.mark.night)]
)
def test_a_tune_in_jobs_is_proven_and_leaves_none(
    slurm: Slurm, tmp_path: Path, leaves_nothing: Check, each: list[str]
) -> None:
    options = ["--rung", "zero2", "--micro-batch", "1", "--global-batch-size", "16", "--time-budget", "10s", *each]
    done = slurm.run(*TUNE, *ON_TWO, *options, folder=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    section = load_best_config(tmp_path / "best_config.json")["ladder"]
    assert (section["num_nodes"], section["world_size"]) == (2, 2)
    assert section["proof"]["tokens_per_second"] > 0
    require_no_job(slurm)
    leaves_nothing()
    assert list((tmp_path / "run" / "jobs").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_tune_that_is_ended_in_a_trial_ends_its_job(
    slurm: Slurm, tmp_path: Path, leaves_nothing: Check, number: signal.Signals
) -> None:
    with begun(slurm, tmp_path) as tune:
        wait_for_a_step(tmp_path)
        tune.send_signal(number)
        tune.wait(timeout=30)
        require_no_job(slurm)
        leaves_nothing()


def test_a_job_whose_login_node_is_gone_ends_itself(slurm: Slurm, tmp_path: Path, leaves_nothing: Check) -> None:
    with begun(slurm, tmp_path) as tune:
        wait_for_a_step(tmp_path)
        process = psutil.Process(tune.pid)
        for each in [*process.children(recursive=True), process]:
            each.kill()
        wait_until(lambda: jobs_in_queue(slurm) == [], files.SILENT_SECONDS + 30)
        leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_tune_that_is_ended_while_its_job_waits_takes_it_out_of_the_queue_and_no_other(
    slurm: Slurm, tmp_path: Path, number: signal.Signals
) -> None:
    other = slurm.submit("--nodes=2", "--exclusive", "--wrap=sleep 300", folder=tmp_path)
    slurm.wait_for(other, "RUNNING")
    with begun(slurm, tmp_path) as tune:
        wait_until(lambda: "waits in the queue (Resources)" in said(tmp_path), 60)
        assert jobs_in_queue(slurm).count("PENDING") == 1
        tune.send_signal(number)
        tune.wait(timeout=30)
        wait_until(lambda: jobs_in_queue(slurm) == ["RUNNING"], 20)
    assert job_of(slurm) == other
    slurm.run("scancel", other, folder=tmp_path)
    require_no_job(slurm)


def test_the_clock_of_a_trial_begins_when_its_job_runs(
    slurm: Slurm, tmp_path: Path, jobs_bench: Callable[[int | None], AbstractContextManager[Bench]]
) -> None:
    with jobs_bench(1) as bench:
        launcher = bench.launcher
        assert isinstance(launcher, JobsLauncher)
        launcher.close()  # the job that described the nodes
        slurm.submit("--nodes=2", "--exclusive", "--wrap=sleep 20", folder=tmp_path)
        asked, clock = now(), launcher.now()
        run = bench.run(tiny_trial(tmp_path / "0001", 1))
        assert run.stop is None
        assert run.requested - asked > 10
        assert launcher.now() - clock < now() - asked - 10


def _cancel(slurm: Slurm, job: str, folder: Path) -> None:
    slurm.run("scancel", job, folder=folder)


def _reach_the_limit(slurm: Slurm, job: str, folder: Path) -> None:
    slurm.run("scontrol", "update", f"jobid={job}", "TimeLimit=1", folder=folder)


def _lose_a_node(slurm: Slurm, job: str, folder: Path) -> None:
    slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test", folder=folder)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (_cancel, "somebody cancelled it"),
        pytest.param(_reach_the_limit, "its time limit was reached", marks=pytest.mark.night),  # a minute is the least
        (_lose_a_node, "a node failed"),
    ],
)
def test_a_job_that_slurm_ends_costs_one_trial_and_is_told(
    slurm: Slurm, tmp_path: Path, leaves_nothing: Check, end: Callable[[Slurm, str, Path], None], why: str
) -> None:
    with begun(slurm, tmp_path) as tune:
        wait_for_a_step(tmp_path)
        first = job_of(slurm)
        end(slurm, first, tmp_path)
        wait_until(lambda: f"Slurm ended job {first} during the trial: {why}" in said(tmp_path), _LIMIT_SECONDS)
        lost = len(trials(tmp_path))
        slurm.run("scontrol", "update", "nodename=node2", "state=resume", folder=tmp_path)
        wait_for_a_step(tmp_path, after=lost)
        assert job_of(slurm) != first
        tune.send_signal(signal.SIGINT)
        assert tune.wait(timeout=60) == 130
        require_no_job(slurm)
        leaves_nothing()


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (
            ["--partition", "nobody"],
            4,
            "Slurm does not take the job: sbatch: error: invalid partition specified: nobody",
        ),
        (["--nodes", "3"], 4, "(PartitionNodeLimit); ask for what the partition has"),
        (["--mem", "900G"], 4, "Memory specification can not be satisfied"),
        (["--wait"], 2, "--wait has no effect with --launcher slurm-jobs"),
    ],
)
def test_what_slurm_never_starts_is_told_before_a_trial(
    slurm: Slurm, tmp_path: Path, options: list[str], status: int, sentence: str
) -> None:
    done = slurm.run(*TUNE, *options, folder=tmp_path, timeout=100)
    assert (done.returncode, sentence in done.stderr) == (status, True), done.stderr
    require_no_job(slurm)
