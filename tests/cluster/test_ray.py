"""Tunes over a real Ray cluster of two nodes, both this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cluster.conftest import Daemons
from helpers import wait_until

from ladder.emit import load_best_config

pytestmark = pytest.mark.cluster
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=4)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
LADDER = [sys.executable, "-m", "ladder.cli.main"]
TUNE = [*LADDER, "tune", "tiny-llama", "--gpus", "0", "--launcher", "ray", "--backend", "deepspeed", "--quiet"]


@pytest.fixture(scope="module")
def ray(short_folder: Path) -> Iterator[Daemons]:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'oom-ladder[ray]')")
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdout is not None
        address = next(line.strip() for line in cluster.stdout if ":" in line)
        with closing(Daemons(short_folder, {"RAY_ADDRESS": address})) as daemons:
            yield daemons
        assert cluster.stdin is not None
        cluster.stdin.close()
        cluster.wait(timeout=60)


def test_without_a_cluster_it_is_said_how_to_start_one(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'oom-ladder[ray]')")
    done = Daemons(tmp_path).command([*TUNE, "--nodes", "2"], tmp_path)
    assert done.returncode == 4
    assert "No Ray cluster answers (" in done.stderr
    assert "start one with `ray start --head`" in done.stderr


def test_a_tune_over_two_nodes_of_a_ray_cluster_is_proven(
    ray: Daemons, tmp_path: Path, leaves_nothing: Callable[[], None]
) -> None:
    done = ray.command([*TUNE, "--nodes", "2", "--time-budget", "10s"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_best_config(tmp_path / "best_config.json")["ladder"]["num_nodes"] == 2
    leaves_nothing()


def test_a_tune_that_is_killed_leaves_nothing_on_any_node_of_ray(
    ray: Daemons, tmp_path: Path, leaves_nothing: Callable[[], None]
) -> None:
    with (tmp_path / "out.txt").open("wb") as out:
        tune = subprocess.Popen(
            [*TUNE, "--nodes", "2", "--run-dir", "run"],
            cwd=tmp_path,
            env={**os.environ, **ray.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    trials = tmp_path / "run" / "trials"
    wait_until(lambda: any("step" in file.read_text() for file in trials.glob("*/rank1.jsonl")), 90)
    tune.send_signal(signal.SIGKILL)
    tune.wait()
    leaves_nothing()


def test_more_nodes_than_the_cluster_has_are_refused(ray: Daemons, tmp_path: Path) -> None:
    done = ray.command([*TUNE, "--nodes", "3"], tmp_path)
    assert done.returncode == 4
    assert "--nodes 3 asks for more than the 2 nodes of the Ray cluster" in done.stderr
