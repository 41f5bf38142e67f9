"""Two hosts with ssh, and a Ray of two nodes, that are both this machine; `helpers.clusters` has the Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from helpers.clusters import PATH, Cluster, daemon, outside, until

_SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/id.pub
StrictModes no
UsePAM no
PermitRootLogin yes
SetEnv {variables}
"""
_SSH = """\
Host worker-1
  HostName {addresses[0]}
Host worker-2
  HostName {addresses[1]}
Host *
  IdentityFile {folder}/id
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
_PASSED_ON = ("LADDER_CACHE", "PYTHONPATH")
"""By the first, tests know the processes of their trials; by the second, a checkout is found that is not installed."""
_WORKERS = ("worker-1", "worker-2")
_NETWORK = f"198.18.{os.environ.get('PYTEST_XDIST_WORKER', 'gw0').removeprefix('gw')}"
"""Reserved for tests (RFC 2544), so no real host has such an address; one for each of several pytest processes."""
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


@contextlib.contextmanager
def two_hosts_with_ssh() -> Iterator[Cluster]:
    """Two hosts, worker-1 and worker-2, that `ssh` reaches without a password.

    Each is a network namespace of this machine with an address of its own, and 127.0.0.1 is on each the host itself. It
    needs root and Debian's packages `openssh-server` and `iproute2`; without them, the test is skipped.
    """
    sshd, client, ip = (shutil.which(name, path=PATH) for name in ("sshd", "ssh", "ip"))
    if sshd is None or client is None or ip is None or os.geteuid() != 0:
        pytest.skip("this needs root and Debian's openssh-server and iproute2")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssh-", dir="/tmp")))
        for name in ("host_key", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        hosts = stack.enter_context(_two_hosts(ip))
        (folder / "ssh_config").write_text(_SSH.format(folder=folder, addresses=list(hosts.values())))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd asks for it
        # ssh reads the configuration in the user's own home alone, which is not ours to change.
        programs = folder / "bin"
        programs.mkdir()
        (programs / "ssh").write_text(f'#!/bin/sh\nexec {client} -F {folder}/ssh_config "$@"\n')
        (programs / "ssh").chmod(0o755)
        cluster = Cluster(folder, outside() | {"PATH": f"{programs}:{PATH}"})
        variables = " ".join(f'"{name}={os.environ[name]}"' for name in _PASSED_ON if name in os.environ)
        for worker, (space, address) in zip(_WORKERS, hosts.items(), strict=True):
            settings = folder / f"sshd_config-{worker}"
            settings.write_text(_SSHD.format(folder=folder, address=address, variables=variables))
            command = ["ip", "netns", "exec", space, sshd, "-D", "-e", "-f", str(settings)]
            stack.enter_context(daemon(cluster, f"sshd-{worker}", command))
        for worker in _WORKERS:
            until(partial(_is_reached, cluster, worker), folder, f"sshd-{worker}")
        yield cluster


def _is_reached(cluster: Cluster, worker: str) -> bool:
    return cluster.run("ssh", worker, "true", folder=cluster.folder).returncode == 0


@contextlib.contextmanager
def _two_hosts(ip: str) -> Iterator[dict[str, str]]:
    """By the name of its network namespace, the address of each of two hosts; this one reaches both over a bridge."""

    def do(*words: str) -> None:
        done = subprocess.run([ip, *words], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this needs network namespaces, and `ip {' '.join(words)}` says {done.stderr.strip()}")

    def undo(*words: str) -> None:
        subprocess.run([ip, *words], check=False, capture_output=True)

    bridge, hosts = f"lb{os.getpid()}", {}
    with ExitStack() as stack:
        do("link", "add", bridge, "type", "bridge")
        stack.callback(undo, "link", "del", bridge)
        do("address", "add", f"{_NETWORK}.254/24", "dev", bridge)
        do("link", "set", bridge, "up")
        for number in (1, 2):
            space, ours = f"ladder-{os.getpid()}-{number}", _our_end(number)
            do("netns", "add", space)
            stack.callback(undo, "netns", "del", space)  # its end of the link goes with it, and so does ours
            do("link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", space)
            do("link", "set", ours, "master", bridge, "up")
            inside = ("-netns", space)
            do(*inside, "address", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                do(*inside, "link", "set", device, "up")
            hosts[space] = f"{_NETWORK}.{number}"
        yield hosts


def _our_end(number: int) -> str:
    """Of the link to worker-`number`, the name of the network interface on this machine."""
    return f"lv{os.getpid()}-{number}"


def set_link(number: int, state: str) -> None:
    """Cut the link to worker-`number` ("down"), or mend it ("up")."""
    subprocess.run(["ip", "link", "set", _our_end(number), state], check=True, env=outside())


@contextlib.contextmanager
def two_nodes_of_ray() -> Iterator[Cluster]:
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
