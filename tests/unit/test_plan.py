"""`ladder plan`: what fits, on how many GPUs, at what price, without a GPU and without torch."""

from __future__ import annotations

import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from ladder.cli.plan import plan as command
from ladder.errors import LadderError, UsageError

app = typer.Typer()
app.command("plan")(command)


def planned(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def rung(plan: dict, name: str) -> dict:
    return next(row for row in plan["rungs"] if row["rung"] == name)


def test_parts_add_up_to_the_peak_of_each_rung():
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "outside_torch")
    for row in planned("llama-2-7b", "--gpus", "4", "--gpu-memory", "80GiB")["rungs"]:
        assert sum(row[f"{part}_gib"] for part in parts) == pytest.approx(row["peak_gib"], abs=0.01)


def test_what_fits_is_within_the_memory_and_what_does_not_says_how_many_gpus_would_do():
    plan = planned("llama-2-7b", "--gpus", "4", "--gpu-memory", "80GiB")
    assert rung(plan, "zero0")["fits"] == "no"
    assert rung(plan, "zero2")["fits"] == "yes"
    assert rung(plan, "zero2")["smallest_gpus"] <= 4
    assert rung(plan, "zero0")["smallest_gpus"] is None


@pytest.mark.parametrize("gpus", ["2", "4", "8"])
def test_what_is_shown_of_a_rung_that_fits_is_sure_to(gpus: str):
    rows = planned("llama-2-7b", "--gpus", gpus, "--gpu-memory", "40GiB")["rungs"]
    upper = [row["upper_gib"] for row in rows if row["fits"] == "yes"]
    assert 0 < max(upper) <= 40


def test_the_default_batch_divides_over_the_gpus():
    assert planned("llama-2-7b", "--gpus", "3", "--gpu-memory", "40GiB")["global_batch_size"] == 129


def test_a_host_too_small_for_the_processes_is_a_host_s_remedy_alone_and_in_gib():
    found = planned("llama-2-7b", "--gpus", "8", "--gpu-memory", "40GiB", "--host-memory", "1GiB")["remedies"]
    assert 1 < found["host_memory_gib"] < 100
    assert found["lora_gib"] is found["qlora_gib"] is None


def test_the_smallest_number_of_gpus_shrinks_with_larger_ones():
    few, many = (
        rung(planned("llama-2-13b", "--gpus", "8", "--gpu-memory", size), "zero3")["smallest_gpus"]
        for size in ("80GiB", "40GiB")
    )
    assert few < many


def test_a_bundled_machine_brings_its_gpus_and_its_host():
    plan = planned("llama-3.1-8b", "--machine", "l4")
    assert plan["gpus"] == 4
    assert plan["host_memory_gib"] == 192
    assert plan["tune_seconds"] > 20
    assert 1 <= plan["tune_trials"] <= 12


def test_offload_that_exceeds_the_host_does_not_fit():
    plan = planned("llama-2-13b", "--machine", "a100-40", "--gpus", "1", "--host-memory", "64GiB")
    assert rung(plan, "zero3+param-cpu+opt-cpu")["fits"] == "no"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-2-7b"], "--gpus and --gpu-memory"),
        (["llama-2-7b", "--gpus", "2"], "--gpu-memory"),
        (["llama-2-7b", "--machine", "a100-40", "--gpu-memory", "80GiB"], "more than"),
        (["llama-2-7b", "--machine", "abacus"], "abacus"),
        (["llama-2-7b", "--machine", "a100-40", "--global-batch-size", "9"], "cannot be divided evenly"),
        (["llama-2-7b", "--machine", "a100-40", "--seq-len", "100000"], "positions"),
    ],
)
def test_contradictory_options_are_one_sentence(arguments: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_an_unknown_model_is_one_sentence():
    with pytest.raises(LadderError):
        CliRunner().invoke(app, ["no such model", "--machine", "l4"], catch_exceptions=False)


def test_the_table_has_a_line_for_each_rung_and_the_price():
    result = CliRunner().invoke(app, ["opt-1.3b", "--machine", "rtx-4090"])
    assert result.exit_code == 0
    assert "zero3+param-cpu+opt-cpu+lean" in result.stdout
    assert "A tune would take about " in result.stdout


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_on_a_narrow_terminal_the_table_has_what_there_is_room_for(columns: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ladder.cli.console.stdout_console", lambda: Console(width=columns))
    result = CliRunner().invoke(app, ["llama-2-7b", "--gpus", "8", "--gpu-memory", "80GiB"], catch_exceptions=False)
    table = result.stdout.split("all ranks.\n")[1].split("GPUs: the fewest")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= columns
    for word in ("peak", "GPUs", "zero0", "zero3", "+param-nvme"):
        assert word in table
    assert ("tokens/s" in table) == (columns >= 80)
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
