"""Tunes over a real Ray cluster of two nodes, both this host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import wait_until
from helpers.clusters import LADDER, Cluster

from ladder.emit import load_best_config

TUNE = [*LADDER, "tune", "tiny-llama", "--gpus", "0", "--launcher", "ray", "--backend", "deepspeed", "--quiet"]


def test_without_a_cluster_it_is_said_how_to_start_one(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'oom-ladder[ray]')")
    done = Cluster(tmp_path, dict(os.environ)).run(*TUNE, "--nodes", "2", folder=tmp_path, timeout=240)
    assert done.returncode == 4
    assert "No Ray cluster answers (" in done.stderr
    assert "start one with `ray start --head`" in done.stderr


def test_a_tune_over_two_nodes_of_a_ray_cluster_is_proven(
    ray: Cluster, tmp_path: Path, leaves_nothing: Callable[[], None]
) -> None:
    done = ray.run(*TUNE, "--nodes", "2", "--time-budget", "10s", folder=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert load_best_config(tmp_path / "best_config.json")["ladder"]["num_nodes"] == 2
    leaves_nothing()


def test_a_tune_that_is_killed_leaves_nothing_on_any_node_of_ray(
    ray: Cluster, tmp_path: Path, leaves_nothing: Callable[[], None]
) -> None:
    tune = ray.begin(*TUNE, "--nodes", "2", "--run-dir", "run", folder=tmp_path)
    trials = tmp_path / "run" / "trials"
    wait_until(lambda: any("step" in file.read_text() for file in trials.glob("*/rank1.jsonl")), 90)
    tune.send_signal(signal.SIGKILL)
    tune.wait()
    leaves_nothing()


def test_more_nodes_than_the_cluster_has_are_refused(ray: Cluster, tmp_path: Path) -> None:
    done = ray.run(*TUNE, "--nodes", "3", folder=tmp_path, timeout=240)
    assert done.returncode == 4
    assert "--nodes 3 asks for more than the 2 nodes of the Ray cluster" in done.stderr
