"""Whole tunes in which a technique beyond the documented ladder is tried, and what their answers say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.values import PAPER
from typer.testing import CliRunner

import ladder
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.cli.main import app
from ladder.emit import best_config, load_best_config
from ladder.emit.exporters.registry import exported
from ladder.errors import UsageError
from ladder.search.remedies import remedies
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.liger import LIGER
from ladder.techniques.ulysses import ULYSSES
from ladder.techniques.unchecked_gradients import UNCHECKED_GRADIENTS
from ladder.tuning.options import TuneOptions
from ladder.tuning.run import TuneOutput, run_tune
from ladder.units import GIB


def test_an_answer_with_states_in_bf16_says_so_in_a_warning_and_they_are_never_tried_unasked(tmp_path: Path) -> None:
    def tuned(name: str, **options: Any) -> ladder.Tuned:
        folder = tmp_path / name
        folder.mkdir()
        return ladder.tune(
            "llama-3.2-1b",
            gpu_memory="22GiB",
            global_batch_size=8,
            run_dir=folder,
            output=folder / "best.json",
            **options,
            **PAPER,
        )

    usual, allowed = tuned("usual"), tuned("allowed", allow=["bf16-states"])
    assert not any("bf16-states" in rung for rung in usual.trials["rung"])
    assert allowed.best.candidate.engine.numerics == (BF16_STATES,)
    assert allowed.best.tokens_per_second > usual.best.tokens_per_second
    assert any("kept in bf16 (--allow bf16-states)" in warning for warning in allowed.best.warnings)
    assert best_config(allowed.best)["ladder"]["bf16_states"] is True
    assert "bitsandbytes" not in allowed.best.versions
    assert "(--allow bf16-states)" in allowed.report.read_text()
    assert "(--allow bf16-states)" not in usual.report.read_text()


def test_unchecked_gradients_are_never_tried_unasked_and_an_answer_with_them_warns(tmp_path: Path) -> None:
    def tuned(name: str, **options: Any) -> ladder.Tuned:
        own: dict[str, Any] = {"run_dir": tmp_path / name, "output": tmp_path / f"{name}.json", "backend": "deepspeed"}
        return ladder.tune("opt-125m", seq_len=512, global_batch_size=64, **own, **options, **PAPER)

    usual, asked = tuned("usual"), tuned("asked", allow=["unchecked-gradients"])
    assert not any("unchecked" in rung for rung in usual.trials["rung"])
    assert UNCHECKED_GRADIENTS in asked.best.candidate.engine.techniques
    assert asked.best.tokens_per_second > usual.best.tokens_per_second
    assert any("one such step ruins the weights" in warning for warning in asked.best.warnings)


def test_documented_leaves_the_ladder_as_it_is_written_down(tmp_path: Path) -> None:
    tuned = ladder.tune(
        "llama-3.2-1b", gpu_memory="24GiB", documented=True, run_dir=tmp_path, output=tmp_path / "best.json", **PAPER
    )
    assert set(tuned.trials["rung"]) <= {rung.name for rung in RUNGS if rung.documented}
    assert set(tuned.trials["checkpointing"]) <= {"on", "off", ""}


def test_a_tune_for_a_small_card_finds_liger_and_says_how_to_switch_it_on(tmp_path: Path) -> None:
    options = PAPER | {"gpu_memory": "16GiB", "seq_len": 2048, "global_batch_size": 64}
    speeds = {}
    for liger in (False, True):
        folder = tmp_path / str(liger)
        folder.mkdir()
        tuned = ladder.tune(
            "llama-3.2-1b", **options, liger=liger, run_dir=folder / "run", output=folder / "best_config.json"
        )
        speeds[liger] = tuned.best.tokens_per_second
        assert (LIGER in tuned.best.candidate.engine.techniques) is liger
        assert tuned.training_arguments().get("use_liger_kernel", False) is liger
        assert ("apply_liger_kernel(model, None)" in tuned.report.read_text()) is liger
        assert ("liger-kernel" in tuned.best.versions) is liger
    assert speeds[True] > 1.1 * speeds[False]
    assert set(tuned.trials["rung"].str.endswith("+liger")) == {True, False}
    said = CliRunner().invoke(app, ["explain", str(folder / "run"), "--why", "zero2+liger"], catch_exceptions=False)
    assert said.stdout.startswith("zero2+liger ")


def test_an_answer_with_moments_in_8_bits_says_so_and_wins_where_the_usual_ones_leave_no_room(tmp_path: Path) -> None:
    tuned = ladder.tune(
        "llama-3.2-1b",
        gpu_memory="22GiB",
        global_batch_size=8,
        allow=["adam-8bit"],
        run_dir=tmp_path,
        output=tmp_path / "best.json",
        **PAPER,
    )
    assert tuned.best.candidate.engine.numerics == (ADAM_8BIT,)
    assert any("kept in 8 bits (--allow adam-8bit)" in warning for warning in tuned.best.warnings)


def tuned_for_sequences(tmp_path: Path, **options: Any) -> TuneOutput:
    """Llama-3.1-8B on eight GPUs held to 24 GiB, on paper."""
    settings: dict[str, Any] = {
        "model": "llama-3.1-8b",
        "machine": "a100-40",
        "launcher": "simulated",
        "seq_len": 131072,
        "global_batch_size": 16,
        "gpu_memory": 24 * GIB,
        "switches": {"liger": True},
        "run_dir": tmp_path / "run",
        "output": tmp_path / "best_config.json",
    }
    return run_tune(TuneOptions(**settings | options))


def test_a_long_sequence_that_fits_no_gpu_is_shared_by_all_and_the_answer_s_environment_says_so(tmp_path: Path) -> None:
    tuned_for_sequences(tmp_path, allow=("ulysses",))
    section = json.loads((tmp_path / "best_config.json").read_text())["ladder"]
    assert section["ulysses"] is True
    assert (section["micro_batch"], section["accumulation"]) == (1, 16)
    assert section["environment"]["PARALLELISM_CONFIG_SP_SIZE"] == "8"
    assert any("share each sequence" in warning for warning in section["warnings"])
    with pytest.raises(UsageError, match="which only environment variables can configure"):
        exported(load_best_config(tmp_path / "best_config.json"), tmp_path / "best_config.json", "trl")
    script = exported(load_best_config(tmp_path / "best_config.json"), tmp_path / "best_config.json", "torchrun")
    assert "export PARALLELISM_CONFIG_SP_SIZE=8\n" in script
    launch = (tmp_path / "best_config.launch.sh").read_text()
    assert "export ACCELERATE_USE_PARALLELISM_CONFIG=true\n" in launch
    assert "position_ids" in launch


def test_unless_it_is_allowed_no_sequence_is_shared_and_the_user_is_told_that_it_could_be(tmp_path: Path) -> None:
    found = tuned_for_sequences(tmp_path)
    assert found.answer is None
    assert not any("ulysses" in record.candidate_key for record in found.result.records)
    assert remedies(found.result.space).techniques == (ULYSSES,)


def test_what_cannot_be_shared_is_not_allowed_in_vain(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--allow ulysses has no effect here: sequences are shared at stage 3"):
        tuned_for_sequences(tmp_path, rungs=("zero2",), allow=("ulysses",))
