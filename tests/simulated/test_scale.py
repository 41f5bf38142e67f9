"""`ladder scale` on machines on paper."""

from __future__ import annotations

import json
from typing import Any

import pytest

import ladder
from ladder.cli.main import main

MODEL = ["scale", "llama-3.2-1b"]

pytestmark = pytest.mark.usefixtures("folder")


def scaled(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert main([*MODEL, *options, "--format", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return found


def test_efficiency_and_cost_compare_with_the_smallest_number(capsys: pytest.CaptureFixture[str]) -> None:
    four, eight = scaled(capsys, "--gpus", "8,4", "--machine", "a100-80", "--price", "2")
    each = [point["tokens_per_second"] / point["gpus"] for point in (four, eight)]
    assert (four["efficiency"], eight["efficiency"]) == (1, each[1] / each[0])
    assert four["cost"] == pytest.approx(1e9 / each[0] / 3600 * 2)
    assert four["low"] < four["tokens_per_second"] < four["high"]


def test_a_prediction_is_that_of_plan_with_the_techniques_that_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--gpus", "16", "--global-batch-size", "16", "--seq-len", "512", "--machine", "a100-80", "--hybrid"]
    (point,) = scaled(capsys, *options)
    assert "+hybrid=8" in point["candidate"]
    assert main(["plan", *MODEL[1:], *options]) == 0
    assert f"about {point['tokens_per_second']:,.0f} tokens/s" in capsys.readouterr().out


def test_the_python_call_finds_what_the_command_finds(capsys: pytest.CaptureFixture[str]) -> None:
    found = scaled(capsys, "--gpus", "4,8", "--machine", "a100-80")
    done = ladder.scale("llama-3.2-1b", gpus="4,8", machine="a100-80")
    assert done.facts["points"] == found
    assert list(done.points["tokens_per_second"]) == [point["tokens_per_second"] for point in found]
    assert repr(done) == "<Scaled: llama-3.2-1b on 4, 8 GPUs>"
    assert done._repr_html_().count("<tr>") == 2
    with pytest.raises(ladder.UsageError, match=r"gpus=…|gpus:"):
        ladder.scale("llama-3.2-1b", gpus="0")


def test_the_table_says_where_nothing_fits_and_the_exit_code_if_it_fits_nowhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["scale", "llama-2-7b", "--gpu-memory", "2.8GiB", "--price", "2", "--gpus"]
    assert main([*options, "1,2"]) == 0
    title, one, two = capsys.readouterr().out.splitlines()
    assert "cost/1e9" in title
    assert "nothing fits" in one
    assert two.rstrip().endswith("(may fit)")
    assert main([*options, "1"]) == 3
    assert "Nothing fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        *(["--gpus", text] for text in ("", "0", "1,,2", "-1", "2.5", "4096", "²", "9" * 5000)),
        ["--gpus", "1"],  # of which memory?
        ["--gpus", "3", "--gpu-memory", "80GiB"],
        ["--script", "train.py"],
        ["--price", "0"],
        ["--allow", "nothing", "--gpu-memory", "80GiB"],
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1
