"""Jobs in a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.conftest import Slurm

pytestmark = pytest.mark.cluster


def test_the_test_cluster_spreads_tasks_over_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.run("srun", "--nodes=2", "--ntasks=2", "sh", "-c", "echo $SLURMD_NODENAME", folder=tmp_path)
    assert sorted(done.stdout.split()) == ["node1", "node2"], done.stderr
