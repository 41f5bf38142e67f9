"""`ladder tune` as it is typed, on a machine on paper: its document, its defaults, and the probes it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ladder.cli.main import main
from ladder.runs.stored_run import read_run
from ladder.simulation.launcher import SimulatedLauncher


def test_a_document_without_an_answer_says_why_there_is_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gpu-memory", "1GiB", "--rung", "zero3", "--launcher", "simulated", "--machine", "a100-40"]
    assert main(["tune", "llama-2-7b", *options, "--format", "json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["answer"], document["exit_code"]) == (None, 3)
    assert "Nothing fits in 1.00 GiB per GPU: 1 candidate failed" in document["error"]


def test_lists_one_value_in_place_of_a_list_and_switches_are_defaults_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "tune: {rung: zero2, micro-batch: [1, 2], launcher: simulated, machine: a100-40, quiet: true, "
        "time-budget: 5m, liger: false, documented: true}"
    )
    (folder / "ladder.yaml").write_text(text)
    assert main(["tune", "llama-2-7b", "--format", "json"]) == 0
    printed = capsys.readouterr()
    candidates = json.loads(printed.out)["candidates"]
    assert {(row["rung"], row["micro_batch"]) for row in candidates} == {("zero2", 1), ("zero2", 2)}
    assert printed.err == ""


def test_a_tune_on_paper_probes_keeps_the_probes_and_goes_on_from_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["tune", "llama-2-7b", "--launcher", "simulated", "--machine", "a100-40", "--run-dir", "run"]
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
    records = read_run(Path("run")).records
    probes = [record for record in records if record.purpose == "probe"]
    assert probes
    assert all(record.tokens_per_second is None for record in probes)
    assert main(command) == 0
    assert "probe of " not in capsys.readouterr().err
    assert len(read_run(Path("run")).records) == len(records)
