"""A technique is its own file and one line: a made-up one goes through search, proof, files and report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.made_up import MADE_UP, including
from helpers.tunes import on_paper
from typer.testing import CliRunner

import ladder
from ladder.cli.main import app
from ladder.emit import load_best_config
from ladder.emit.exporters.registry import exported
from ladder.errors import UsageError
from ladder.techniques.keys import engine_named
from ladder.techniques.registry import TECHNIQUES


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with including(TECHNIQUES, MADE_UP):
        yield


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, registered: None) -> ladder.Tuned:
    return on_paper(
        tmp_path_factory.mktemp("made up"), "llama-3.2-1b", gpu_memory="24GiB", global_batch_size=16, allow=["made-up"]
    )


def test_it_is_tried_measured_and_proven_and_predicted_beside_the_usual_engine(tuned: ladder.Tuned) -> None:
    assert set(tuned.trials["rung"].str.endswith("+made-up")) == {True, False}
    best = tuned.best
    assert MADE_UP in best.candidate.engine.techniques
    proofs = [record for record in tuned.output.result.records if record.purpose == "proof"]
    assert [record.candidate_key for record in proofs] == [best.candidate.key]
    assert engine_named(best.candidate.engine.name) == best.candidate.engine
    space = tuned.output.result.space
    plain = next(each for each in space.candidates if not each.engine.techniques and each.checkpointing == "off")
    special = replace(plain, engine=plain.engine.having(MADE_UP))
    assert space.predicted_peak(special) < space.predicted_peak(plain)


def test_its_words_are_in_the_files_the_report_and_the_explanation(tuned: ladder.Tuned) -> None:
    home = tuned.output.run_dir.parent
    path = home / "best_config.json"
    document = load_best_config(path)
    section = document["ladder"]
    assert section["made_up"] is True
    assert section["environment"]["MADE_UP"] == "1"
    assert MADE_UP.consent.caution in section["warnings"]
    assert json.loads(path.with_name("best_config.trainer.json").read_text())["use_made_up"] is True
    assert "export MADE_UP=1" in path.with_name("best_config.launch.sh").read_text()
    assert "use_made_up" in exported(document, path, "trl")
    with pytest.raises(UsageError, match="--for axolotl: this answer is made up"):
        exported(document, path, "axolotl")
    assert "computed by magic" in tuned.report.read_text()
    rung = tuned.best.candidate.engine.name
    said = CliRunner().invoke(app, ["explain", str(home / "run"), "--why", rung], catch_exceptions=False)
    assert said.stdout.startswith(rung)


def test_where_it_can_have_no_effect_it_is_refused_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='allow="made-up" has no effect here: magic is for causal-lm'):
        on_paper(tmp_path, "roberta-base", allow=["made-up"])
