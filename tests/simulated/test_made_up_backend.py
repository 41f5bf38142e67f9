"""A backend is its own files and one line: a made-up one goes through search, proof, files and report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.made_up import MADE_UP, including
from helpers.made_up_backend import MADE_UP_BACKEND
from helpers.tunes import on_paper
from helpers.values import bundled_workload, problem_for
from typer.testing import CliRunner

import ladder
from ladder.backends.registry import BACKENDS, RUNGS_BY_NAME
from ladder.candidates import Engine, engines_having
from ladder.cli.main import app
from ladder.emit import load_best_config
from ladder.emit.exporters.registry import exported
from ladder.errors import UsageError
from ladder.techniques.liger import LIGER

[RUNG] = MADE_UP_BACKEND.rungs


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with including(BACKENDS, MADE_UP_BACKEND):
        yield


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, registered: None) -> ladder.Tuned:
    return on_paper(tmp_path_factory.mktemp("made up"), "opt-125m", gpus=2, rungs=["zero1", "zero2", RUNG.name])


def test_it_is_tried_measured_and_proven_beside_the_main_one(tuned: ladder.Tuned) -> None:
    measured = tuned.trials[tuned.trials["status"] == "measured"]
    assert RUNG.name in set(measured["rung"])
    assert tuned.plain is not None
    assert tuned.plain.candidate.engine.rung == RUNG
    assert tuned.best.candidate.engine.rung.name in ("zero1", "zero2")
    assert tuned.plain.tokens_per_second > tuned.best.tokens_per_second
    proofs = [record for record in tuned.output.result.records if record.purpose == "proof"]
    assert tuned.plain.candidate.key in [record.candidate_key for record in proofs]


def test_it_is_predicted_by_its_own_formulas(tuned: ladder.Tuned) -> None:
    space = tuned.output.result.space
    own = [each for each in space.candidates if each.engine.rung == RUNG]
    assert own
    assert all(space.predicted_peak(each) > 16.0 * space.workload.weights.trained for each in own)


def test_its_words_are_in_the_files_the_report_and_the_explanation(tuned: ladder.Tuned) -> None:
    home = tuned.output.run_dir.parent
    path = home / "best_plain.json"
    document = load_best_config(path)
    assert document["ladder"]["environment"]["MAGIC"] == "1"
    assert json.loads((home / "best_plain.trainer.json").read_text())["use_magic"] == 2
    assert yaml.safe_load((home / "best_plain.accelerate.yaml").read_text())["distributed_type"] == "MAGIC"
    assert "# The weights were enchanted." in (home / "best_plain.launch.sh").read_text()
    assert yaml.safe_load(exported(document, path, "trl"))["magic"] is True
    for program, said in (("axolotl", "it knows no magic"), ("deepspeed", "trains without DeepSpeed")):
        with pytest.raises(UsageError, match=f"--for {program}: .*{said}"):
            exported(document, path, program)
    assert load_best_config(home / "best_config.json")["ladder"]["plain"]["rung"] == RUNG.name
    assert RUNG.name in tuned.report.read_text()
    explained = CliRunner().invoke(app, ["explain", str(home / "run"), "--why", RUNG.name], catch_exceptions=False)
    assert explained.stdout.startswith(RUNG.name)
    assert list(ladder.load_run(home / "run").trials["rung"]) == list(tuned.trials["rung"])


def test_it_has_the_techniques_that_its_rung_is_open_to() -> None:
    problem = problem_for(bundled_workload("llama-3.2-1b"), 2)
    own, usual = Engine(RUNG), Engine(RUNGS_BY_NAME["zero1"])
    assert engines_having(LIGER, [own, usual], problem) == [own.having(LIGER), usual.having(LIGER)]
    assert engines_having(MADE_UP, [own, usual], problem) == [usual.having(MADE_UP)]


@pytest.mark.parametrize(
    ("model", "gpus", "why"),
    [("opt-125m", 1, "magic needs two ranks"), ("roberta-base", 2, "magic is for causal-lm")],
)
def test_where_it_cannot_be_tried_it_says_why(tmp_path: Path, model: str, gpus: int, why: str) -> None:
    found = on_paper(tmp_path, model, gpus=gpus, rungs=["zero1", RUNG.name])
    assert found.output.result.unsupported == {RUNG: why}


@pytest.mark.parametrize("options", [{"backend": "deepspeed"}, {"documented": True}])
def test_who_asks_for_others_alone_does_not_get_it(tmp_path: Path, options: dict[str, Any]) -> None:
    found = on_paper(tmp_path, "opt-125m", gpus=2, micro_batches=[1], **options)
    assert RUNG.name not in set(found.trials["rung"])
