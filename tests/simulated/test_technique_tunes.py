"""Whole tunes in which a technique beyond the documented ladder is tried, and what their answers say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tunes import on_paper
from typer.testing import CliRunner

import ladder
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.candidates import Technique
from ladder.cli.main import app
from ladder.emit import load_best_config
from ladder.emit.exporters.registry import exported
from ladder.errors import UsageError
from ladder.search.remedies import remedies
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.liger import LIGER
from ladder.techniques.ulysses import ULYSSES
from ladder.techniques.unchecked_gradients import UNCHECKED_GRADIENTS

CRAMPED: dict[str, Any] = {"model": "llama-3.2-1b", "gpu_memory": "22GiB", "global_batch_size": 8}
ROOMY: dict[str, Any] = {"model": "opt-125m", "seq_len": 512, "global_batch_size": 64, "backend": "deepspeed"}


@pytest.mark.parametrize(
    ("technique", "options", "warning"),
    [
        (BF16_STATES, CRAMPED, "kept in bf16 (--allow bf16-states)"),
        (ADAM_8BIT, CRAMPED, "kept in 8 bits (--allow adam-8bit)"),
        (UNCHECKED_GRADIENTS, ROOMY, "one such step ruins the weights"),
    ],
)
def test_what_needs_consent_is_never_tried_unasked_and_an_answer_with_it_is_faster_and_warns(
    technique: Technique, options: dict[str, Any], warning: str, tmp_path: Path
) -> None:
    usual = on_paper(tmp_path / "usual", **options)
    allowed = on_paper(tmp_path / "allowed", allow=[technique.name], **options)
    assert technique in allowed.best.candidate.engine.techniques
    assert allowed.best.tokens_per_second > usual.best.tokens_per_second
    assert any(warning in each for each in allowed.best.warnings)
    for tuned, is_tried in ((allowed, True), (usual, False)):
        assert any(technique.label in rung for rung in tuned.trials["rung"]) is is_tried
        assert (warning in tuned.report.read_text()) is is_tried


def test_documented_leaves_the_ladder_as_it_is_written_down(tmp_path: Path) -> None:
    tuned = on_paper(tmp_path, "llama-3.2-1b", gpu_memory="24GiB", documented=True)
    assert set(tuned.trials["rung"]) <= {rung.name for rung in RUNGS if rung.documented}
    assert set(tuned.trials["checkpointing"]) <= {"on", "off", ""}
    assert tuned.plain is None


def test_a_tune_for_a_small_card_finds_liger_and_says_how_to_switch_it_on(tmp_path: Path) -> None:
    speeds = {}
    for liger in (False, True):
        folder = tmp_path / str(liger)
        tuned = on_paper(folder, "llama-3.2-1b", gpu_memory="16GiB", seq_len=2048, global_batch_size=64, liger=liger)
        speeds[liger] = tuned.best.tokens_per_second
        assert (LIGER in tuned.best.candidate.engine.techniques) is liger
        assert tuned.training_arguments().get("use_liger_kernel", False) is liger
        assert ("apply_liger_kernel(model, None)" in tuned.report.read_text()) is liger
        assert ("liger-kernel" in tuned.best.versions) is liger
    assert speeds[True] > 1.1 * speeds[False]
    assert set(tuned.trials["rung"].str.endswith("+liger")) == {True, False}
    said = CliRunner().invoke(app, ["explain", str(folder / "run"), "--why", "zero2+liger"], catch_exceptions=False)
    assert said.stdout.startswith("zero2+liger ")


def tuned_for_sequences(folder: Path, **options: Any) -> ladder.Tuned:
    """Llama-3.1-8B on eight GPUs held to 24 GiB."""
    here = {"machine": "a100-40", "gpus": None, "gpu_memory": "24GiB", "liger": True}
    return on_paper(folder, "llama-3.1-8b", seq_len=131072, global_batch_size=16, **here, **options)


def test_a_long_sequence_that_fits_no_gpu_is_shared_by_all_and_the_answer_s_environment_says_so(tmp_path: Path) -> None:
    tuned_for_sequences(tmp_path, allow=["ulysses"])
    path = tmp_path / "best_config.json"
    section = json.loads(path.read_text())["ladder"]
    assert section["ulysses"] is True
    assert (section["micro_batch"], section["accumulation"]) == (1, 16)
    assert section["environment"]["PARALLELISM_CONFIG_SP_SIZE"] == "8"
    assert any("share each sequence" in warning for warning in section["warnings"])
    with pytest.raises(UsageError, match="which only environment variables can configure"):
        exported(load_best_config(path), path, "trl")
    assert "export PARALLELISM_CONFIG_SP_SIZE=8\n" in exported(load_best_config(path), path, "torchrun")
    launch = path.with_name("best_config.launch.sh").read_text()
    assert "export ACCELERATE_USE_PARALLELISM_CONFIG=true\n" in launch
    assert "position_ids" in launch


def test_unless_it_is_allowed_no_sequence_is_shared_and_the_user_is_told_that_it_could_be(tmp_path: Path) -> None:
    found = tuned_for_sequences(tmp_path).output
    assert found.answer is None
    assert not any("ulysses" in record.candidate_key for record in found.result.records)
    assert remedies(found.result.space).techniques == (ULYSSES,)
