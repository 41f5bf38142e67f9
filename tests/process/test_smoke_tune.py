"""The smoke tune, through the command line, for real: two CPU ranks, DeepSpeed, and memory that really runs out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import SMALL_TUNE, Finished, ladder

from ladder.candidates import checkpointing_name
from ladder.emit import load_best_config

pytestmark = pytest.mark.timeout(900)  # the first test waits for the small tune, which a busy machine disturbs
RUN = "ladder-runs/small"
CANDIDATES = {(rung, checkpointing, 1) for rung in ("zero0", "zero2") for checkpointing in ("on", "1/2", "off")}


def trials_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "trials").iterdir())


def test_the_tune_finds_an_answer_and_leaves_no_process(small_tune_done: tuple[Path, Finished]) -> None:
    _, done = small_tune_done
    assert done.status == 0, done.errors
    assert done.num_marked >= 3  # the server and two ranks, so that the next line can fail
    assert done.num_left == 0
    assert "Traceback" not in done.errors


def test_a_rank_really_ran_out_of_memory_and_is_named_with_the_bytes_it_asked_for(
    small_tune_done: tuple[Path, Finished],
) -> None:
    folder, done = small_tune_done
    table = pd.read_csv(folder / RUN / "trials.csv")
    dead = table[table["outcome"] == "gpu_oom"]
    assert len(dead) > 0
    for why in dead["why"]:
        assert re.match(
            r"rank [01] reached its memory limit in \w+: asked for \d+(\.\d+)? [MG]iB with \d+(\.\d+)? [MG]iB free", why
        )
        assert why in done.errors
    for trial in dead["trial"]:
        logs = [path.read_text() for path in (folder / RUN / "trials" / f"{int(trial):04d}").glob("rank*.jsonl")]
        assert any("can't allocate memory" in log or "MemoryError" in log for log in logs)


def test_every_candidate_is_in_trials_csv_with_a_reason_and_zero2_fits_where_zero0_does_not(
    small_tune_done: tuple[Path, Finished],
) -> None:
    table: Any = pd.read_csv(small_tune_done[0] / RUN / "trials.csv")
    rows = {(row.rung, row.checkpointing, int(row.micro_batch)) for row in table.itertuples()}
    assert rows == CANDIDATES
    assert len(table) == len(CANDIDATES)
    assert table["why"].notna().all()
    assert set(table[table["outcome"] == "fits"]["rung"]) == {"zero2"}
    assert list(table["status"]).count("answer") == 1
    assert set(table["status"]) <= {"answer", "measured", "pruned"}


def test_best_config_is_the_proven_answer_and_loads(small_tune_done: tuple[Path, Finished]) -> None:
    folder, done = small_tune_done
    config = load_best_config(folder / "best_config.json")
    section = config["ladder"]
    assert section["rung"] == "zero2"
    assert config["zero_optimization"]["stage"] == 2
    assert config["train_batch_size"] == 4
    assert section["proof"]["evaluation"] is True
    assert "auto" not in json.dumps(section)
    answer = pd.read_csv(folder / RUN / "trials.csv").query("status == 'answer'").iloc[0]
    assert (
        section["micro_batch"],
        checkpointing_name(section["checkpoint_every"], section["offload_activations"]),
    ) == (
        answer["micro_batch"],
        answer["checkpointing"],
    )
    for suffix in ("json", "trainer.json", "accelerate.yaml", "launch.sh"):
        assert (folder / f"best_config.{suffix}").exists()
    assert "proven in fresh processes" in done.output


def test_the_same_command_again_starts_no_trial_and_gives_the_same_answer(
    small_tune_done: tuple[Path, Finished],
) -> None:
    folder, _ = small_tune_done
    trials = trials_of(folder / RUN)
    again = ladder(*SMALL_TUNE, "--output", "again.json", folder=folder)
    assert again.status == 0
    assert trials_of(folder / RUN) == trials
    before, after = (load_best_config(folder / name) for name in ("best_config.json", "again.json"))
    for config in (before, after):  # the folder is a copy of the first one
        del config["ladder"]["run_dir"], config["ladder"]["digest"]
    assert after == before
    assert "\ntrial " not in again.errors
    assert again.num_left == 0


def test_the_proof_times_the_products_of_the_model_alone(small_tune_done: tuple[Path, Finished]) -> None:
    folder, _ = small_tune_done
    section = load_best_config(folder / "best_config.json")["ladder"]
    assert section["bound_tokens_per_second"] > section["tokens_per_second"] > 0
    said = ladder("explain", RUN, "--bound", "--format", "json", folder=folder)
    assert said.status == 0, said.errors
    document = json.loads(said.output)
    assert document["bound_tokens_per_second"] == section["bound_tokens_per_second"]
    assert sum(document["parts"].values()) == pytest.approx(document["step_seconds"], rel=0.03)
