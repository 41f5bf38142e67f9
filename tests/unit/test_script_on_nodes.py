"""`ladder run` of an answer for several nodes: one copy on each, which meet on the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from ladder.errors import UsageError
from ladder.tuning.options import RunOptions
from ladder.tuning.script_run import meeting, require_nodes

ANSWER = Path("best_config.json")


def test_a_copy_that_knows_no_first_node_is_told_what_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match=r"start best_config\.launch\.sh on each of them"):
        require_nodes(ANSWER, 2, RunOptions())
    monkeypatch.setenv("MASTER_ADDR", "node1")
    require_nodes(ANSWER, 2, RunOptions())


def test_copies_on_several_nodes_do_not_step_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with pytest.raises(UsageError, match="--step-down is for one node"):
        require_nodes(ANSWER, 2, RunOptions(step_down=True))


def test_the_copies_meet_on_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "node1"), ("MASTER_PORT", "4711"), ("SLURM_JOB_ID", "12")):
        monkeypatch.setenv(name, value)
    assert meeting(1, 8) == ["--standalone", "--nproc_per_node", "8"]
    words = meeting(2, 8)
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--nnodes": "2",
        "--nproc_per_node": "8",
        "--rdzv_backend": "c10d",
        "--rdzv_id": "12",
        "--rdzv_endpoint": "node1:4711",
    }
