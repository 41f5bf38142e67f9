"""A Ray cluster that `ray symmetric-run` starts on two hosts, as in a Slurm job, with a tune as its program."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.clusters import LADDER, Cluster

from ladder.emit import load_best_config

pytestmark = pytest.mark.night
TUNE = [*LADDER, "tune", "tiny-llama", "--gpus", "0", "--launcher", "ray", "--nodes", "2"]


def test_a_tune_inside_symmetric_run_uses_both_hosts_with_token_authentication(ssh: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'oom-ladder[ray]')")
    ray = str(Path(sys.executable).parent / "ray")
    options = ["--address", "198.18.0.1:6379", "--min-nodes", "2", "--num-cpus", "2"]
    words = [ray, "symmetric-run", *options, "--", *TUNE, "--backend", "deepspeed", "--rung", "zero2", "--quiet"]
    variables = {
        "PATH": ssh.environment["PATH"],  # it calls `ray`
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
        "LADDER_CACHE": os.environ["LADDER_CACHE"],
    }
    there = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
    command = f"cd -- {shlex.quote(str(tmp_path))} && exec {shlex.join(there)}"
    hosts = [
        subprocess.Popen(
            ["ssh", "-tt", worker, command],
            env=ssh.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for worker in ("worker-1", "worker-2")
    ]
    try:
        said, _ = hosts[0].communicate(timeout=240)
    finally:
        for host in hosts:
            host.kill()  # the other host's `ray start --block` ends with its terminal
            host.communicate()
    assert hosts[0].returncode == 0, said
    assert load_best_config(tmp_path / "best_config.json")["ladder"]["num_nodes"] == 2
