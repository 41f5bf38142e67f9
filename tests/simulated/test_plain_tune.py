"""A whole tune of all backends on a machine that exists on paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.cli.main import main


def tune(*arguments: str) -> int:
    return main(["tune", *arguments, "--launcher", "simulated", "--machine", "h100-80"])


def test_a_tune_of_all_backends_on_paper_has_two_answers_and_says_that_both_are_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("opt-125m", "--gpus", "2") == 0
    printed = capsys.readouterr().out
    assert "Without DeepSpeed: fsdp2" in printed
    assert printed.count("Warning: simulated on h100-80: ") == 1
    assert "faster than the answer, without DeepSpeed" in " ".join(printed.split())
    answer = json.loads((folder / "best_config.json").read_text())["ladder"]
    assert answer["rung"] not in {rung.name for rung in PLAIN_RUNGS}
    for name in ("accelerate.yaml", "trainer.json"):
        assert (folder / f"best_plain.{name}").is_file()
    assert "no GPU ran" in (folder / "best_plain.launch.sh").read_text()
    assert main(["report", "--format", "markdown"]) == 0
    assert "without DeepSpeed" in capsys.readouterr().out


def test_one_gpu_without_deepspeed_has_only_the_plain_files_computes_with_16_bit_weights_and_is_told_what_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = ("--rung", "fsdp2+no-reshard", "--rung", "fsdp2+cpu")
    assert tune("opt-125m", "--gpus", "1", "--backend", "torch", *rungs) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "fsdp2+cpu (on one GPU, DeepSpeed's offload does the same)" in told
    assert not (folder / "best_config.json").exists()
    accelerate = (folder / "best_plain.accelerate.yaml").read_text()
    assert "distributed_type: FSDP" in accelerate
    assert "num_processes: 1" in accelerate
