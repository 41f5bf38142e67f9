"""An sshd and a Ray of two nodes that are both this machine; `helpers.clusters` has the Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.clusters import PATH, Cluster, daemon, free_ports, outside, until

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
_RAY = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=4)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="session")
def ssh() -> Iterator[Cluster]:
    """An sshd by which `ssh` reaches the hosts worker-1 and worker-2 without a password; both are this machine.

    It needs root and Debian's packages `openssh-server` and `openssh-client`; without them, the test is skipped.
    """
    sshd, client = shutil.which("sshd", path=PATH), shutil.which("ssh", path=PATH)
    if sshd is None or client is None or os.geteuid() != 0:
        pytest.skip("this needs root and Debian's openssh-server")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssh-", dir="/tmp")))
        (port,) = free_ports(1)
        for name in ("host_key", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "sshd_config").write_text(_SSHD.format(folder=folder, port=port))
        (folder / "ssh_config").write_text(_SSH.format(folder=folder, port=port))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
        # ssh reads the configuration in the user's own home alone, which is not ours to change.
        programs = folder / "bin"
        programs.mkdir()
        (programs / "ssh").write_text(f'#!/bin/sh\nexec {client} -F {folder}/ssh_config "$@"\n')
        (programs / "ssh").chmod(0o755)
        cluster = Cluster(folder, outside() | {"PATH": f"{programs}:{PATH}"})
        stack.enter_context(daemon(cluster, "sshd", [sshd, "-D", "-e", "-f", str(folder / "sshd_config")]))
        until(lambda: cluster.run("ssh", "worker-1", "true", folder=folder).returncode == 0, folder, "sshd")
        yield cluster


@pytest.fixture(scope="session")
def ray() -> Iterator[Cluster]:
    """A Ray cluster of two nodes, four cores each. It needs Ray; without it, the test is skipped."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'oom-ladder[ray]')")
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        subprocess.Popen([sys.executable, "-c", _RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it,
    ):
        assert it.stdout is not None
        address = next(line.strip() for line in it.stdout if ":" in line)
        yield Cluster(Path(folder), outside() | {"RAY_ADDRESS": address})
        it.communicate(timeout=60)  # it ends when its stdin does


@pytest.fixture(scope="session")
def leaves_nothing() -> Callable[[], None]:
    """Waits, at most five seconds, until no process of these tests' trials is left on this machine: it is all nodes."""

    def check() -> None:
        deadline = time.monotonic() + 5
        while (left := _of_trials()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []

    return check


def _of_trials() -> list[str]:
    ours = b"LADDER_CACHE=" + os.environ["LADDER_CACHE"].encode()  # a tune beside the tests has another
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if ours not in path.with_name("environ").read_bytes().split(b"\0"):
                continue
            found += [word.decode() for word in words if word in (b"ladder.trial.server", b"ladder.launch.nodes.agent")]
    return found
