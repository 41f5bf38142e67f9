"""The keeper of a Slurm job, beside a Slurm that does not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from helpers import wait_until

from ladder.errors import EnvironmentFaultError
from ladder.launch.jobs import files
from ladder.launch.jobs.job import Asked, Job
from ladder.launch.jobs.launcher import Jobs
from ladder.launch.modules import module_command, module_environment
from ladder.launch.nodes.cluster import Wanted
from ladder.launch.watch import now

pytest.importorskip("submitit", reason="submitit is not installed (pip install 'oom-ladder[slurm-jobs]')")


@pytest.fixture
def silent_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a job, and says no more."""
    for name, line in (("sbatch", "echo Submitted batch job 12"), ("squeue", "exec sleep 60"), ("scancel", "exit 0")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)


@pytest.mark.usefixtures("silent_slurm")
def test_a_squeue_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from ladder.launch.jobs import keeper

    monkeypatch.setattr(keeper, "_SQUEUE_SECONDS", 1)
    queue, began = keeper.Queue("ladder-1"), now()
    assert queue.get_state("12", "force") == "UNKNOWN"
    assert 0.9 < now() - began < 10


def test_the_end_of_a_job_does_not_depend_on_when_its_keeper_is_heard(tmp_path: Path, silent_slurm: None) -> None:
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho HEAD\necho '12|RUNNING|n1|None|10:00'\n")
    begun = now()
    job = Job(Asked(nodes=1, time="10"), tmp_path / "jobs" / "1", lambda sentence: None, lambda: False)
    try:
        time.sleep(4)  # the keeper has said it long before it is heard
        job.wait_until_it_runs()
        assert job.ends_at is not None
        assert job.ends_at - 600 - begun < 3.5
    finally:
        with suppress(OSError):
            files.append(job.folder / "12_0_result.pkl", b"")  # as a job that has ended
        job.close()


def test_a_job_that_ended_before_its_turn_came_is_replaced_once(tmp_path: Path, silent_slurm: None) -> None:
    programs, notes = tmp_path / "bin", list[str]()
    count = tmp_path / "count"
    (programs / "sbatch").write_text(f"#!/bin/sh\necho >> {count}\necho Submitted batch job $(wc -l < {count})\n")
    (programs / "squeue").write_text("#!/bin/sh\necho HEAD\necho '1|TIMEOUT|||0:00'\necho '2|FAILED|||0:00'\n")
    asked, wanted = Asked(nodes=1, time="10"), Wanted(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None)
    with closing(Jobs(asked, wanted, tmp_path / "jobs", trials=1, queued=2, note=notes.append)) as jobs:
        jobs.trial_begins()
        with pytest.raises(EnvironmentFaultError, match="Slurm job 2 ended before it ran a trial"):
            jobs.machine()
    assert notes == ["Slurm job 1 ended before its turn came; another one is submitted."]
    assert count.read_text() == "\n\n"


def differs(file: Path, before: bytes) -> bool:
    return file.read_bytes() != before


@pytest.mark.usefixtures("silent_slurm")
def test_the_tune_gives_signs_of_life_while_slurm_is_silent(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    files.create(folder, 1)
    parameters = Asked(nodes=1, time="10").parameters("ladder-job", folder)
    keeper = subprocess.Popen(
        module_command("ladder.launch.jobs.keeper"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=module_environment({}),
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        asked = {"folder": str(folder), "place": str(tmp_path), "parameters": parameters}
        keeper.stdin.write(json.dumps(asked).encode() + b"\n")
        keeper.stdin.flush()
        assert json.loads(keeper.stdout.readline()) == {"event": "submitted", "job": "12"}
        for _ in range(2):
            sign = files.alive(folder).read_bytes()
            wait_until(partial(differs, files.alive(folder), sign), 15)
    finally:
        for child in psutil.Process(keeper.pid).children(recursive=True):
            child.kill()
        keeper.kill()
        keeper.wait()
        keeper.stdin.close()
        keeper.stdout.close()


def test_a_pipe_that_cannot_write_says_so_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    files.create(folder, 1)
    files.requests(folder, 0).unlink()
    files.requests(folder, 0).mkdir()
    program = f"from ladder.launch.jobs import pipe; pipe._END_SECONDS = 0.2; pipe.carry(pipe.Path({str(folder)!r}), 0)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=b"{}\n", stderr=subprocess.PIPE, timeout=30, check=False)
    assert b"IsADirectoryError" in done.stderr
