"""Clusters that run for tests: their commands, their daemons, and a Slurm of two nodes that are this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

LADDER = (sys.executable, "-m", "ladder.cli.main")
NODES = ("node1", "node2")
_CORES = 4
"""Of each virtual node. Chosen: enough for four tasks; Slurm is told not to compare it with the machine."""
_DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Cluster:
    """A running cluster."""

    folder: Path
    """Its configuration, state and logs; `*.log` says why a daemon did not do what it should."""
    environment: dict[str, str]
    """What commands need to find it, and nothing of a job around this process."""

    def run(
        self, *command: str, folder: Path, timeout: float = 60, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` in `folder` as on the login node, with its output captured; it may fail."""
        return subprocess.run(
            command,
            check=False,
            cwd=folder,
            env={**self.environment, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def begin(self, *command: str, folder: Path) -> subprocess.Popen[bytes]:
        """Start `command` in `folder`, with its output in the file out.txt there."""
        with (folder / "out.txt").open("wb") as out:
            return subprocess.Popen(
                command, cwd=folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )


class Slurm(Cluster):
    """With its jobs."""

    def submit(self, *arguments: str, folder: Path) -> str:
        """The number of a job that sbatch accepted."""
        done = self.run("sbatch", "--parsable", *arguments, folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says, such as `JobState` and `Restarts`."""
        done = self.run("scontrol", "--oneliner", "show", "job", number, folder=self.folder)
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_for(self, number: str, *states: str, seconds: float = 90) -> dict[str, str]:
        """The job once it is in one of `states`, or without them, once it has ended."""
        deadline = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in (states or _ENDED):
            assert time.monotonic() < deadline, f"job {number} is still {job['JobState']}: {job.get('Reason')}"
            time.sleep(0.2)
        return job


@contextlib.contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A Slurm with the nodes node1 and node2, four cores each and no GPUs, all on this machine.

    It needs root, and Debian's packages `slurm-wlm` and `munge` (their services may be stopped); without them, the
    test is skipped. Authentication, state, logs and ports are its own, and its daemons end with the test session.
    Both nodes share this machine's file system, memory and processes; SLURMD_NODENAME in a task names its node.
    """
    missing = [name for name in _DAEMONS if shutil.which(name, path=PATH) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a test cluster needs root and Debian's slurm-wlm and munge (missing: {', '.join(missing)})")
    with ExitStack() as stack:
        # Directly in /tmp, because a socket's path has at most 107 characters.
        folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)  # munged refuses others
        _configure(folder)
        cluster = Slurm(folder, outside() | {"SLURM_CONF": str(folder / "slurm.conf")})
        stack.enter_context(daemon(cluster, "munged", _munged(folder)))
        until((folder / "munge.socket").exists, folder, "munged")
        stack.enter_context(daemon(cluster, "slurmctld", ["slurmctld", "-D"]))
        for node in NODES:
            stack.enter_context(daemon(cluster, f"slurmd-{node}", ["slurmd", "-D", "-N", node]))
        stack.callback(_end_jobs, cluster)
        until(lambda: _num_idle(cluster) == len(NODES), folder, "slurmctld")
        yield cluster


def outside() -> dict[str, str]:
    """The environment without a job around this process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {"PATH": PATH}


def _munged(folder: Path) -> list[str]:
    paths = {name: folder / f"munge.{name}" for name in ("socket", "key", "pid", "log", "seed")}
    return [
        *("munged", "--foreground", "--force", f"--socket={paths['socket']}", f"--key-file={paths['key']}"),
        *(f"--pid-file={paths['pid']}", f"--log-file={paths['log']}", f"--seed-file={paths['seed']}"),
    ]


def _configure(folder: Path) -> None:
    """Write slurm.conf and what it names. With cred_expire, a requeued job starts after 7 seconds and not 120."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is used, and none is looked for
    (folder / "plugstack.conf").write_text("")
    for name in ("state", *NODES):
        (folder / name).mkdir()
    controller, *ports = free_ports(1 + len(NODES))
    host = socket.gethostname()
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CORES} RealMemory=4000"
        for name, port in zip(NODES, ports, strict=True)
    ]
    settings = f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=15
MailProg=/bin/true
PartitionName=all Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""
    (folder / "slurm.conf").write_text(settings + "\n".join(nodes) + "\n")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def daemon(cluster: Cluster, name: str, command: Sequence[str]) -> Iterator[None]:
    """A daemon in the foreground: a child of ours, which ends here."""
    program = shutil.which(command[0], path=PATH)
    assert program is not None
    with (cluster.folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [program, *command[1:]],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cluster.folder,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _num_idle(cluster: Slurm) -> int:
    done = cluster.run("sinfo", "--noheader", "--Node", "--format=%t", folder=cluster.folder)
    return done.stdout.split().count("idle")


def _end_jobs(cluster: Slurm) -> None:
    """Their processes are children of Slurm's daemons, and have to end before them."""
    cluster.run("scancel", "--user=root", folder=cluster.folder)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and cluster.run("squeue", "--noheader", folder=cluster.folder).stdout.strip():
        time.sleep(0.2)


def until(condition: Callable[[], bool], folder: Path, name: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            log = folder / f"{name}.log"
            pytest.fail(f"{name} is not ready:\n{log.read_text()[-3000:] if log.exists() else ''}")
        time.sleep(0.1)
