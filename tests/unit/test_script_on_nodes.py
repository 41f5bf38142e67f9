"""`ladder run` of an answer for several nodes: one copy on each, which meet on the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.answers import answer

from ladder.cli.main import main
from ladder.emit import emit_all
from ladder.errors import UsageError
from ladder.options.answer import RunOptions
from ladder.tuning.script_run import meeting, require_nodes

ANSWER = Path("best_config.json")


def test_copies_on_several_nodes_have_to_know_the_first_and_do_not_step_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match=r"start best_config\.launch\.sh on each of them"):
        require_nodes(ANSWER, 2, RunOptions())
    monkeypatch.setenv("MASTER_ADDR", "node1")
    require_nodes(ANSWER, 2, RunOptions())
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


@pytest.mark.parametrize("is_head_known", [False, True])
@pytest.mark.parametrize(
    ("num_nodes", "place", "code", "said"),
    [
        (1, "0", 2, "was not tuned for a script"),  # it works, as far as it can without one
        (1, "1", 0, "this is copy 2 of 2 that srun started"),
        (2, "1", 2, "was not tuned for a script"),
    ],
)
def test_only_an_answer_for_several_nodes_is_run_on_each(
    num_nodes: int,
    place: str,
    code: int,
    said: str,
    is_head_known: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": place, "SLURM_NODEID": place}
    for name, value in {**step, "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if is_head_known:
        monkeypatch.setenv("MASTER_ADDR", "node1")
    config = emit_all(answer(num_nodes=num_nodes), tmp_path / "best_config.json")[0]
    assert main(["run", str(config)]) == code
    assert said in capsys.readouterr().err
