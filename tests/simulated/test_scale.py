"""`ladder scale` on machines on paper."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

import ladder
from ladder.cli.main import main

MODEL = ["scale", "llama-3.2-1b"]
ON_PAPER = ["--launcher", "simulated", "--machine", "a100-80"]


pytestmark = pytest.mark.usefixtures("folder")


def scaled(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*MODEL, *options, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_simulated_numbers_are_tuned_and_larger_ones_predicted_from_their_runs_and_the_report_tells_them_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = scaled(capsys, "--gpus", "2,4,8", "--price", "2.5", *ON_PAPER)
    assert [point["source"] for point in tuned["points"]] == ["simulated"] * 3
    two, four, eight = (Path(f"ladder-scale/{count}-gpus/run") for count in (2, 4, 8))
    runs = [word for run in (two, four) for word in ("--runs", str(run))]
    found = scaled(capsys, "--gpus", "2,4,8", "--no-trials", "--price", "2", "--output", "later", *runs)
    assert [point["source"] for point in found["points"]] == ["simulated", "simulated", "predicted"]
    seen, (small, _, guess) = tuned["points"][2], found["points"]
    assert abs(math.log(guess["tokens_per_second"] / seen["tokens_per_second"])) < 0.1
    alone = scaled(capsys, "--gpus", "8", "--no-trials", "--machine", "a100-80")["points"][0]
    assert guess["high"] / guess["low"] < alone["high"] / alone["low"]

    page = Path("later", "report.html").read_text()
    for heading in ("Tokens per second", "Efficiency"):
        assert f"<h2>{heading}</h2>" in page
    assert f"2 GPUs, {small['candidate']}: simulated, {small['tokens_per_second']:,.0f} tokens/s, 100%" in page
    span = f"({guess['low']:,.0f} to {guess['high']:,.0f})"
    assert f"8 GPUs, {guess['candidate']}: predicted, {guess['tokens_per_second']:,.0f} tokens/s {span}" in page
    assert found["verdict"] in page
    assert f"<td>{guess['cost']:,.2f}</td>" in page

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("scale")
    errors = benchmark.errors_of_stored([eight, two, four])
    rows = capsys.readouterr().out.splitlines()
    counts = [word for row in rows for word in row.split() if word.startswith("gpus=")]
    assert counts == ["gpus=4", "gpus=8"], rows
    assert all(error < 0.2 for error, _ in errors)
    assert benchmark.errors_of_stored([two, four]) == errors[:1], "each from the smaller ones alone"
    with pytest.raises(SystemExit, match="of each number of GPUs one"):
        benchmark.errors_of_stored([two, two])


def test_between_nodes_what_keeps_traffic_inside_them_is_tried_and_predicted_if_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    numbers = ["--gpus", "16", "--global-batch-size", "16", "--seq-len", "512"]
    on_paper = ["--no-trials", "--machine", "a100-80"]
    (usual,) = scaled(capsys, *numbers, *on_paper)["points"]
    (divided,) = scaled(capsys, *numbers, *on_paper, "--hybrid")["points"]
    assert "+hybrid=8" in divided["candidate"]
    assert divided["tokens_per_second"] > 1.05 * usual["tokens_per_second"]
    (tuned,) = scaled(capsys, *numbers, *ON_PAPER, "--hybrid")["points"]
    assert "+hybrid=8" in tuned["candidate"]


def test_the_python_call_finds_what_the_command_finds_and_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = scaled(capsys, "--gpus", "4,6,8", "--no-trials", "--machine", "a100-80")
    assert "divide" in found["left_out"]["6"]
    done = ladder.scale("llama-3.2-1b", gpus="4,6,8", trials=False, machine="a100-80", quiet=True)
    assert done.result.plain() == found
    assert list(done.points["tokens_per_second"]) == [point["tokens_per_second"] for point in found["points"]]
    assert (done.smallest, done.verdict) == (found["smallest_gpus"], found["verdict"])
    assert done.report.is_file()
    assert repr(done).startswith("<Scaled: llama-3.2-1b on 4, 8 GPUs; The fewest of these that fit: 4.")
    assert done._repr_html_().count("<td>predicted</td>") == 2
    with pytest.raises(ladder.UsageError, match=r"gpus=…|gpus:"):
        ladder.scale("llama-3.2-1b", gpus="0", quiet=True)


def test_that_nothing_fits_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "llama-2-7b", "--gpus", "1,2", "--no-trials", "--gpu-memory", "3GiB"]) == 3
    assert "Nothing fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--script", "train.py"],
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
