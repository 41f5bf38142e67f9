"""`ladder scale` on machines on paper."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ladder.cli.main import main

MODEL = ["scale", "llama-3.2-1b"]
ON_PAPER = ["--launcher", "simulated", "--machine", "a100-80"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scaled(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*MODEL, *options, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_simulated_numbers_are_tuned_and_larger_ones_predicted_from_their_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned = scaled(capsys, "--gpus", "2,4,8", "--price", "2.5", *ON_PAPER)
    assert [point["source"] for point in tuned["points"]] == ["simulated"] * 3
    runs = [word for count in (2, 4) for word in ("--runs", f"ladder-scale/{count}-gpus/run")]
    found = scaled(capsys, "--gpus", "2,4,8", "--no-trials", *runs)
    assert [point["source"] for point in found["points"]] == ["simulated", "simulated", "predicted"]
    seen, guess = tuned["points"][2], found["points"][2]
    assert abs(math.log(guess["tokens_per_second"] / seen["tokens_per_second"])) < 0.1
    alone = scaled(capsys, "--gpus", "8", "--no-trials", "--machine", "a100-80")["points"][0]
    assert guess["high"] / guess["low"] < alone["high"] / alone["low"]


def test_numbers_that_cannot_divide_the_batch_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = scaled(capsys, "--gpus", "4,6,8", "--no-trials", "--machine", "a100-80")
    assert [point["gpus"] for point in found["points"]] == [4, 8]
    assert "divide" in found["left_out"]["6"]


def test_that_nothing_fits_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "llama-2-7b", "--gpus", "1,2", "--no-trials", "--gpu-memory", "3GiB"]) == 3
    assert "Nothing fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--gpus", "0"],
        ["--script", "train.py"],
        ["--gpus", "2,2"],
        ["--gpus", "3"],
        ["--price", "0"],
        ["--machine", "a100-80"],
        ["--gpus-per-node", "4", *ON_PAPER],
        ["--runs", "nowhere"],
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1
