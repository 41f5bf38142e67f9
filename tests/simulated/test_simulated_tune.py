"""`ladder tune --launcher simulated`: the whole product on a machine that exists on paper, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ladder.cli.main import main
from ladder.options.tune import TuneOptions
from ladder.simulation.paper_machine import machine_files
from ladder.tuning.run import run_tune
from ladder.tuning.tune_events import Note
from ladder.units import GIB

ON_PAPER = ["--launcher", "simulated", "--machine"]


def tune(*arguments: str, machine: str = "a100-40") -> int:
    return main(["tune", "tiny-llama", "--gpus", "2", "--seq-len", "64", *ON_PAPER, machine, *arguments])


def test_a_tune_on_paper_says_everywhere_that_nothing_was_run_and_started_again_it_runs_no_trial(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune() == 0
    printed = capsys.readouterr()
    assert "Simulated: a simulator of the machine a100-40 answers each trial" in printed.err
    assert "simulated on a100-40" in printed.out
    assert re.search(r"tokens/s in its proof \([\d,]+ in its trial\), ", printed.out)
    assert "as fast as the documented recipe's first fit (" in printed.out
    assert "would have taken" in printed.out
    (page,) = folder.glob("ladder-runs/*/report.html")
    said = {"tune": printed.out, "page": page.read_text()}
    for command in ("explain", "report --format markdown", "report --format csv"):
        assert main(command.split()) == 0
        said[command] = capsys.readouterr().out
    for text in said.values():
        assert "the fastest with DeepSpeed, simulated; its proof reached " in text
        assert "proven in fresh processes" not in text
    assert said["explain"].endswith("Simulated: a simulator answered each trial and each proof, and no GPU ran.\n")
    section = json.loads((folder / "best_config.json").read_text())["ladder"]
    assert section["proof"]["simulated"] is True
    assert section["tokens_per_second_range"] is None, "on a machine whose speed varies little"
    assert "no GPU ran" in section["warnings"][0]
    assert tune() == 0
    assert "trial 0" not in capsys.readouterr().err
    assert json.loads((folder / "best_config.json").read_text())["ladder"] == section


def test_a_long_search_proves_a_first_answer_which_is_left_when_it_is_interrupted(folder: Path) -> None:
    said: list[str] = []
    assert tune() == 0  # another tune's answer is in the way
    options = TuneOptions(model="llama-2-7b", gpus=4, gpu_memory=40 * GIB, launcher="simulated", machine="h200")
    tell = lambda event: said.extend([event.text] if isinstance(event, Note) else [])  # noqa: E731
    done = run_tune(options, tell, lambda: said[-1:] != [] and said[-1].startswith("First answer: "))
    assert done.result.cancelled
    assert said[-2].startswith("Kept what another tune wrote, or was edited, as ")
    assert done.result.first is not None
    assert done.answer is not None
    assert done.result.first.proof.candidate_key == done.answer.candidate.key
    assert said[-1].endswith(
        " tokens/s in its proof, is in best_config.json. The search for a faster one goes on; Ctrl-C ends it."
    )
    assert (
        json.loads((folder / "best_config.json").read_text())["ladder"]["rung"]
        == done.answer.candidate.engine.rung.name
    )
    whole = run_tune(options)
    assert not whole.result.cancelled
    assert whole.answer is not None
    assert whole.answer.tokens_per_second >= done.answer.tokens_per_second


def test_a_run_folder_of_one_paper_machine_is_not_taken_for_anothers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = machine_files()["a100-40"].read_text()
    (folder / "one.yaml").write_text(machine)
    (folder / "other.yaml").write_text(f"{machine}\nname: one\nseed: 7\n")
    assert tune("--run-dir", "run", machine="one.yaml") == 0
    assert tune("--run-dir", "run", machine="other.yaml") == 2
    assert "simulated machine differ" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "tried"), [(["--knobs", "3"], 3), (["--time-budget", "1h"], 12)])
def test_knobs_are_tried_if_asked_for_or_with_the_time_that_a_budget_leaves(
    option: list[str], tried: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--rung", "zero2", *option) == 0
    assert capsys.readouterr().err.count("knobs of the fastest candidate") == tried
    (table,) = folder.glob("ladder-runs/*/trials.csv")
    assert len(re.findall(r"; with \w+=", table.read_text())) == tried


def test_a_budget_below_one_trial_gives_what_one_finds_and_is_not_spent_again_without_deepspeed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--time-budget", "1s") == 0
    printed = capsys.readouterr()
    assert "more than the time budget of 1 s allows" in printed.err
    assert "of the time budget of 1 s, no time is left to try" in " ".join(printed.out.split())
    assert not (folder / "best_plain.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--launcher", "simulated"], "needs a --machine"),
        (["--machine", "l4"], "add --launcher simulated"),
        ([*ON_PAPER, "abacus"], "neither a file nor a bundled machine; choose from a10, a100-40, "),
        ([*ON_PAPER, "l4", "--cold"], "--cold has no effect"),
        ([*ON_PAPER, "l4", "--wait"], "--wait has no effect"),
        ([*ON_PAPER, "l4", "--save-weights", "x"], "--save-weights has no effect"),
        ([*ON_PAPER, "l4", "--gpus", "0"], "leave out --gpus 0"),
        ([*ON_PAPER, "l4", "--gpu-memory", "80GiB"], "more than the 22 GiB that l4 has"),
        ([*ON_PAPER, "diskless.yaml", "--nvme-path", "/nvme"], "has no NVMe drive"),
        ([*ON_PAPER, "coloured.yaml"], "'gpu_colour' is unknown"),
        ([*ON_PAPER, "l4", "--tolerance", "0.1", "--strategy", "walk"], "--tolerance has no effect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_contradicts_itself_is_one_sentence(
    arguments: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = machine_files()["l4"].read_text()
    (folder / "coloured.yaml").write_text(machine + "\ngpu_colour: green\n")
    (folder / "diskless.yaml").write_text(machine.replace("nvme_space: 1TiB", "nvme_space: 0"))
    assert main(["tune", "tiny-llama", *arguments]) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.startswith("ladder: ")
    assert not (folder / "ladder-runs").exists()


def test_what_is_proven_of_a_narrower_tune_does_not_keep_a_faster_candidate_from_its_proof(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three slow answers lie in the run folder, each with its proof, before the whole ladder is searched."""
    options = ["--gpus", "4", *ON_PAPER, "h100-80", "--run-dir", "run", "--quiet"]
    slow = ("zero3+opt-cpu", "zero2+opt-cpu", "zero3+param-cpu")
    for rung in slow:
        assert main(["tune", "llama-2-7b", *options, "--rung", rung]) == 0
    assert main(["tune", "llama-2-7b", *options]) == 0
    among_others = json.loads((folder / "best_config.json").read_text())["ladder"]
    options[options.index("run")] = "fresh"
    assert main(["tune", "llama-2-7b", *options]) == 0
    fresh = json.loads((folder / "best_config.json").read_text())["ladder"]
    assert not {among_others["engine"], fresh["engine"]} & {*slow}
    assert among_others["tokens_per_second"] > 0.98 * fresh["tokens_per_second"]  # of two that are equally fast, any


def test_going_up_the_ladder_begins_where_something_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 64 GiB on the host the most frugal steps, which offload to it, ask too much."""
    options = ["--gpus", "4", *ON_PAPER, "h100-80", "--host-memory", "64GiB", "--quiet"]
    assert main(["tune", "llama-2-7b", *options, "--strategy", "reverse"]) == 0
    assert "opt-cpu" not in json.loads((folder / "best_config.json").read_text())["ladder"]["rung"]


def test_where_the_host_is_too_small_more_of_its_memory_is_named_and_is_enough(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*ON_PAPER, "h200", "--gpus", "4", "--global-batch-size", "40", "--rung", "zero3+param-cpu+opt-cpu"]
    assert main(["tune", "opt-1.3b", *options, "--host-memory", "32GiB", "--quiet"]) == 3
    said = capsys.readouterr().err
    assert "GPUs of" not in said
    assert " 5 GPUs" not in said
    (named,) = re.findall(r"([\d.]+) GiB of host memory or", said)
    assert main(["tune", "opt-1.3b", *options, "--host-memory", f"{float(named) + 0.01}GiB", "--quiet"]) == 0


def test_a_tune_that_was_narrowed_reports_neither_the_trials_nor_the_answer_of_the_one_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpus", "4", *ON_PAPER, "h100-80", "--run-dir", "run", "--quiet"]
    assert main(["tune", "llama-2-7b", *options]) == 0
    assert "accelerate launch" in (folder / "run" / "report.html").read_text()
    assert main(["tune", "llama-2-7b", *options, "--rung", "zero0", "--output", "other.json"]) == 3
    by_tune = (folder / "run" / "report.html").read_text()
    assert main(["report", "run"]) == 0
    for page in (by_tune, (folder / "run" / "report.html").read_text()):
        assert "Nothing fits so far" in page
        assert "accelerate launch" not in page
        assert "losses compared" not in page
        assert re.search(r" in 1 trial\b", page)


def test_a_machine_whose_speed_varies_is_promised_a_range_in_the_file_on_the_last_lines_and_in_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "m.yaml").write_text(machine_files()["a100-40"].read_text() + "noise: 0.4\n")
    assert tune("--rung", "zero1", machine="m.yaml") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert main(["report", "--format", "markdown"]) == 0
    section = json.loads((folder / "best_config.json").read_text())["ladder"]
    low, high = section["tokens_per_second_range"]
    assert low < section["tokens_per_second"] < high
    assert f", {low:,.0f} to {high:,.0f} tokens/s in a training, " in printed
    assert f"- tokens/s, in a training: {low:,.0f} to {high:,.0f}\n" in capsys.readouterr().out


def test_a_tune_on_paper_that_trains_a_part_needs_less_memory_and_names_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["llama-3.2-1b", "--gpus", "1", *ON_PAPER, "a100-40", "--rung", "zero0", "--micro-batch", "1"]
    parts = {
        "": [],
        "LoRA with r=16": ["--lora", "r=16"],
        "QLoRA with r=16": ["--lora", "r=16", "--load-in", "4bit"],
        "trained": ["--freeze", "model.embed_tokens", "--freeze", "model.layers.[0-7]"],
    }
    peaks = []
    for number, (said, part) in enumerate(parts.items()):
        assert main(["tune", *command, *part, "--run-dir", f"run{number}", "--output", f"{number}.json"]) == 0
        assert said in " ".join(capsys.readouterr().err.split())
        answer = json.loads((folder / f"{number}.json").read_text())["ladder"]
        peaks.append(answer["memory_per_gpu"]["peak_allocated_gib"])
    assert all(peak < 0.75 * peaks[0] for peak in peaks[1:])
