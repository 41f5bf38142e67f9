"""A whole tune of all backends on a machine that exists on paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.cli.main import main

NAMES = {rung.name for rung in PLAIN_RUNGS}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune(*arguments: str) -> int:
    return main(["tune", *arguments, "--launcher", "simulated", "--machine", "h100-80"])


def test_a_tune_of_all_backends_on_paper_has_two_answers_and_says_that_both_are_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("opt-1.3b", "--gpus", "2") == 0
    printed = capsys.readouterr().out
    assert "Without DeepSpeed: fsdp2" in printed
    assert printed.count("Warning: simulated on h100-80: ") == 1
    assert "faster than the answer, without DeepSpeed" in " ".join(printed.split())
    assert json.loads((folder / "best_config.json").read_text())["ladder"]["rung"] not in NAMES
    for name in ("accelerate.yaml", "trainer.json", "launch.sh"):
        assert (folder / f"best_plain.{name}").is_file()
    launch = (folder / "best_plain.launch.sh").read_text()
    assert "no GPU ran" in launch
    capsys.readouterr()
    assert main(["report", "--format", "markdown"]) == 0
    assert "without DeepSpeed" in capsys.readouterr().out


def test_a_budget_that_deepspeed_has_spent_is_not_spent_again_without_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("llama-3.2-1b", "--gpus", "2", "--time-budget", "1s") == 0
    assert not (folder / "best_plain.json").exists()
    assert "of the time budget of 1 s, no time is left to try" in " ".join(capsys.readouterr().out.split())


def test_the_documented_ladder_has_no_rung_without_deepspeed(folder: Path) -> None:
    assert tune("llama-3.2-1b", "--gpus", "2", "--documented") == 0
    assert not (folder / "best_plain.json").exists()


def test_without_deepspeed_only_the_plain_files_are_written(folder: Path) -> None:
    assert tune("opt-125m", "--gpus", "2", "--backend", "torch") == 0
    assert not (folder / "best_config.json").exists()
    assert (folder / "best_plain.launch.sh").is_file()


def test_one_gpu_computes_with_16_bit_weights_under_fsdp2_and_is_told_what_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = ("--rung", "fsdp2+no-reshard", "--rung", "fsdp2+cpu")
    assert tune("opt-125m", "--gpus", "1", *rungs) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "fsdp2+cpu (on one GPU, DeepSpeed's offload does the same)" in told
    assert "Without DeepSpeed: fsdp2+no-reshard" in told
    accelerate = (folder / "best_plain.accelerate.yaml").read_text()
    assert "distributed_type: FSDP" in accelerate
    assert "num_processes: 1" in accelerate
