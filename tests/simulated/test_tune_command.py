"""`ladder tune` as it is typed, on a machine on paper: its document, its defaults, and the probes it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ladder.cli.main import main
from ladder.runs.stored_run import read_run
from ladder.simulation.launcher import SimulatedLauncher


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--gpu-memory", "1GiB", "--rung", "zero3"], 3, "Nothing fits in 1.00 GiB per GPU: 1 candidate failed"),
        (["--rung", "zero3+opt-nvme"], 2, "can work here: zero3+opt-nvme: no --nvme-path was given"),
    ],
)
def test_a_document_without_an_answer_says_why_there_is_none(
    arguments: list[str], status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = ["--launcher", "simulated", "--machine", "a100-40", "--run-dir", str(tmp_path / "run")]
    assert main(["tune", "llama-2-7b", *arguments, *paper, "--format", "json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["answer"] is None
    assert document["exit_code"] == status
    assert words in document["error"]


def test_lists_and_switches_are_defaults_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "tune: {rung: [zero2], micro-batch: [1, 2], launcher: simulated, machine: a100-40, quiet: true, "
        "time-budget: 5m, liger: false, documented: true}"
    )
    (folder / "ladder.yaml").write_text(text)
    assert main(["tune", "llama-2-7b", "--format", "json", "--run-dir", "run"]) == 0
    printed = capsys.readouterr()
    candidates = json.loads(printed.out)["candidates"]
    assert {(row["rung"], row["micro_batch"]) for row in candidates if row["trial"]} <= {("zero2", 1), ("zero2", 2)}
    assert printed.err == ""


def test_one_value_stands_for_a_list_of_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ladder.yaml").write_text("tune: {rung: zero2, micro-batch: 2}")
    options = ["--launcher", "simulated", "--machine", "a100-40", "--format", "json", "--run-dir", "run", "--quiet"]
    assert main(["tune", "llama-2-7b", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"]
    assert {(row["rung"], row["micro_batch"]) for row in rows} == {("zero2", 2)}


def test_a_tune_on_paper_probes_keeps_the_probes_and_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    command = ["tune", "llama-2-7b", "--gpus", "4", "--gpu-memory", "40GiB", "--launcher", "simulated"]
    command += ["--machine", "h200", "--run-dir", "run"]
    shallow = []
    run_trial = SimulatedLauncher.run

    def watched(launcher, spec, *rest):
        if spec.probe:
            shallow.append(spec.model_config_json["num_hidden_layers"])
        return run_trial(launcher, spec, *rest)

    monkeypatch.setattr(SimulatedLauncher, "run", watched)
    assert main(command) == 0
    printed = capsys.readouterr().err
    assert "probe of " in printed
    assert " s for a step with a few layers" in printed
    assert set(shallow) == {4}
    records = read_run(tmp_path / "run").records
    probes = [record for record in records if record.purpose == "probe"]
    assert probes
    assert all(record.tokens_per_second is None for record in probes)
    assert main(command) == 0
    assert "probe of " not in capsys.readouterr().err
    assert len(read_run(tmp_path / "run").records) == len(records)
