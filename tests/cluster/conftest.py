"""A real Slurm of two virtual nodes, and a real sshd, both of this host, started and ended by the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers import wait_until

_SLURM = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=main Nodes=node1,node2 Default=YES State=UP
"""
_SSHD = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/id.pub
StrictModes no
UsePAM no
PermitRootLogin yes
"""
_SSH = """\
Host worker-1 worker-2
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@dataclass
class Daemons:
    """Programs in the foreground that end with the tests, and what a command needs to reach them."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str) -> None:
        with (self.folder / f"daemon-{len(self.running)}.log").open("wb") as log:
            self.running.append(
                subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **self.environment})
            )

    def command(self, command: Sequence[str], folder: Path, seconds: float = 240) -> subprocess.CompletedProcess[str]:
        """Run `command` in `folder` to its end."""
        return subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def close(self) -> None:
        for daemon in reversed(self.running):
            daemon.terminate()
        for daemon in reversed(self.running):
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()
            daemon.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports


def _need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: apt-get install slurm-wlm openssh-server)")
    if os.getuid() != 0:
        pytest.skip("only root can start these daemons")


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """munge's socket is in it, whose path must be short; and every user may pass through to it."""
    folder = Path(tempfile.mkdtemp(prefix="ladder-cluster-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm(short_folder: Path) -> Iterator[Daemons]:
    """A cluster whose nodes node1 and node2 have four cores each on paper; `srun`, `salloc`, … find it."""
    _need("munged", "slurmctld", "slurmd", "srun")
    key = short_folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (short_folder / "state").mkdir()
    conf = short_folder / "slurm.conf"
    conf.write_text(_SLURM.format(host=socket.gethostname(), folder=short_folder, ports=_free_ports(3)))
    daemons = Daemons(short_folder, {"SLURM_CONF": str(conf)})
    with closing(daemons):
        files = [f"--{name}-file={short_folder}/munge.{name}" for name in ("pid", "log", "seed")]
        daemons.start("munged", "-F", "--force", f"--key-file={key}", f"--socket={short_folder}/munge.socket", *files)
        wait_until((short_folder / "munge.socket").exists)
        daemons.start("slurmctld", "-D")
        for node in ("node1", "node2"):
            daemons.start("slurmd", "-D", "-N", node)
        wait_until(lambda: daemons.command(["sinfo", "-h", "-o", "%D%t"], short_folder).stdout.strip() == "2idle")
        yield daemons


@pytest.fixture(scope="session")
def ssh(short_folder: Path) -> Iterator[Daemons]:
    """The hosts worker-1 and worker-2, which `ssh` reaches without a password."""
    _need("sshd", "ssh", "ssh-keygen")
    (port,) = _free_ports(1)
    for name in ("host_key", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(short_folder / name)], check=True)
    (short_folder / "sshd_config").write_text(_SSHD.format(folder=short_folder, port=port))
    (short_folder / "ssh_config").write_text(_SSH.format(folder=short_folder, port=port))
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd, not started by init, wants to be alone
    programs = short_folder / "bin"
    programs.mkdir()
    # ssh reads the configuration of the user's home alone, which is not ours to change.
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {short_folder}/ssh_config "$@"\n')
    (programs / "ssh").chmod(0o755)
    daemons = Daemons(short_folder, {"PATH": f"{programs}:{os.environ['PATH']}"})
    with closing(daemons):
        daemons.start(shutil.which("sshd") or "sshd", "-D", "-e", "-f", str(short_folder / "sshd_config"))
        wait_until(lambda: daemons.command(["ssh", "worker-1", "true"], short_folder).returncode == 0)
        yield daemons


@pytest.fixture(scope="session")
def leaves_nothing() -> Callable[[], None]:
    """Waits until no process of trials is left on this host, which is all nodes; at most five seconds."""

    def check() -> None:
        deadline = time.monotonic() + 5
        while (left := _of_trials()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []

    return check


def _of_trials() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            found += [word.decode() for word in words if word in (b"ladder.trial.server", b"ladder.launch.nodes.agent")]
    return found
