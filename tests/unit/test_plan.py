"""`ladder plan`: what fits, on how many GPUs, at what price, without a GPU and without torch."""

from __future__ import annotations

import json
import re

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from ladder.cli.plan import plan as command
from ladder.errors import UsageError

app = typer.Typer()
app.command("plan")(command)


def planned(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def rung(plan: dict, name: str) -> dict:
    return next(row for row in plan["rungs"] if row["rung"] == name)


@pytest.fixture(scope="module")
def seven_billion() -> dict:
    """On four GPUs of 80 GiB."""
    return planned("llama-2-7b", "--gpus", "4", "--gpu-memory", "80GiB")


def test_what_fits_is_sure_to_and_what_does_not_says_how_many_gpus_would_do(seven_billion: dict):
    upper = [row["upper_gib"] for row in seven_billion["rungs"] if row["fits"] == "yes"]
    assert 0 < max(upper) <= 80
    assert rung(seven_billion, "zero0")["fits"] == "no"
    assert rung(seven_billion, "zero2")["smallest_gpus"] <= 4
    assert rung(seven_billion, "zero0")["smallest_gpus"] is None
    assert seven_billion["global_batch_size"] % 4 == 0


def test_parts_add_up_to_the_peak_of_each_rung(seven_billion: dict):
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "outside_torch")
    for row in seven_billion["rungs"]:
        assert sum(row[f"{part}_gib"] for part in parts) == pytest.approx(row["peak_gib"], abs=0.01)


def test_the_smallest_number_of_gpus_shrinks_with_larger_ones(seven_billion: dict):
    many = rung(planned("llama-2-7b", "--gpus", "4", "--gpu-memory", "24GiB"), "zero3")["smallest_gpus"]
    assert rung(seven_billion, "zero3")["smallest_gpus"] < many


def test_a_bundled_machine_brings_its_gpus_and_its_host():
    plan = planned("llama-3.1-8b", "--machine", "l4")
    assert plan["gpus"] == 4
    assert plan["host_memory_gib"] == 192
    assert plan["tune_seconds"] > 20
    assert 1 <= plan["tune_trials"] <= 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-2-7b"], "--gpus and --gpu-memory"),
        (["llama-2-7b", "--machine", "a100-40", "--gpu-memory", "80GiB"], "more than"),
        (["llama-2-7b", "--machine", "abacus"], "abacus"),
        (["llama-2-7b", "--machine", "a100-40", "--global-batch-size", "9"], "cannot be divided evenly"),
        (["opt-125m", "--machine", "a100-40", "--seq-len", "100000"], "positions"),
    ],
)
def test_contradictory_options_are_one_sentence(arguments: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_on_a_narrow_terminal_the_table_has_what_there_is_room_for(columns: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ladder.cli.console.stdout_console", lambda: Console(width=columns))
    result = CliRunner().invoke(app, ["llama-2-7b", "--gpus", "8", "--gpu-memory", "80GiB"], catch_exceptions=False)
    table = result.stdout.split("all ranks.\n")[1].split("GPUs: the fewest")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= columns
    for word in ("peak", "GPUs", "zero0", "zero3", "+param-nvme"):
        assert word in table
    assert ("tokens/s" in table) == (columns >= 80)
    bars = dict(re.findall(r"^(\S+) .* ([wgoalbx]+>?) +[\d.]+ +[\d.]+ +[>\d]+ *$", table, re.MULTILINE))
    assert ("zero2" in bars) == (columns == 80)
    if bars:  # of 80 GiB, in tenths
        assert bars["zero0"] == "wwggggooo>"
        assert set(bars["zero2+opt-cpu"]) <= set("wgalbx"), "the optimizer is on the host"
    assert all((part in table) == (columns >= 120) for part in ("weights", "grads", "optim.", "activ.", "logits"))


def test_the_fastest_rung_that_fits_is_marked_and_its_speed_is_told(monkeypatch: pytest.MonkeyPatch):
    plan = planned("llama-2-7b", "--gpus", "8", "--gpu-memory", "40GiB")
    fitting = [row for row in plan["rungs"] if row["fits"] == "yes"]
    fastest = max(fitting, key=lambda row: row["tokens_per_second"])
    assert plan["expected_winner"] == fastest["rung"]
    monkeypatch.setattr("ladder.cli.console.stdout_console", lambda: Console(width=120, force_terminal=True))
    result = CliRunner().invoke(app, ["llama-2-7b", "--gpus", "8", "--gpu-memory", "40GiB"], color=True)
    bold_green = [line for line in result.stdout.splitlines() if "\x1b[1;32m" in line]
    assert [line.split("m", 1)[1].split()[0] for line in bold_green] == [fastest["rung"]]
    assert f"Expected winner: {fastest['rung']} " in " ".join(result.stdout.split())
    assert f"about {fastest['tokens_per_second']:,} tokens/s." in " ".join(result.stdout.split())
