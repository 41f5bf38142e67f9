"""The smoke tune, through the command line, for real: two CPU ranks, DeepSpeed, and memory that really runs out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest
from helpers import TINY_CONFIG, processes_with

from ladder.emit import load_best_config
from ladder.protocol import RUN_MARKER

TUNE = ["tune", "tiny-llama", "--gpus", "0", "--strategy", "exhaustive", "--run-dir", "run"]
TUNE += ["--rung", "zero0", "--rung", "zero2", "--micro-batch", "1", "--micro-batch", "4"]
CANDIDATES = {(rung, on, size) for rung in ("zero0", "zero2") for on in (True, False) for size in (1, 4)}
TEST_MARKER = "LADDER_TEST_MARKER"


@dataclass
class Finished:
    """A command that ended, and what was seen of it."""

    status: int
    output: str
    errors: str
    num_marked: int
    """The most processes that carried the run's marker at once."""
    num_left: int
    """Descendants that outlived it."""


def ladder(*arguments: str, folder: Path) -> Finished:
    """Run the command line in `folder`. Its descendants are known by a variable that they inherit."""
    test_marker = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-m", "ladder.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, TEST_MARKER: test_marker, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
        stdin=subprocess.DEVNULL,
        stdout=(folder / "stdout.txt").open("w"),
        stderr=(folder / "stderr.txt").open("w"),
    )
    num_marked = 0
    while process.poll() is None:
        num_marked = max(num_marked, len(with_run_marker(processes_with(TEST_MARKER, test_marker))))
        time.sleep(1)
    left = processes_with(TEST_MARKER, test_marker)
    for survivor in left:
        survivor.kill()
    output, errors = ((folder / f"std{name}.txt").read_text() for name in ("out", "err"))
    return Finished(process.returncode, output, errors, num_marked, len(left))


def with_run_marker(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    marked = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            marked += [process] if RUN_MARKER in process.environ() else []
    return marked


def trials_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "trials").iterdir())


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One real tune, in a folder with an awkward name."""
    folder = tmp_path_factory.mktemp('it\'s a "smoke" tune é')
    return folder, ladder(*TUNE, folder=folder)


def test_the_tune_finds_an_answer_and_leaves_no_process(tuned: tuple[Path, Finished]) -> None:
    _, done = tuned
    assert done.status == 0, done.errors
    assert done.num_marked >= 3  # the server and two ranks, so that the next line can fail
    assert done.num_left == 0
    assert "Traceback" not in done.errors


def test_a_rank_really_ran_out_of_memory_and_is_named_with_the_bytes_it_asked_for(tuned: tuple[Path, Finished]) -> None:
    folder, done = tuned
    table = pd.read_csv(folder / "run" / "trials.csv")
    dead = table[table["outcome"] == "gpu_oom"]
    assert len(dead) > 0
    for why in dead["why"]:
        assert re.match(
            r"rank [01] ran out of .* in \w+: asked for \d+(\.\d+)? [MG]iB with \d+(\.\d+)? [MG]iB free", why
        )
        assert why in done.errors
    for trial in dead["trial"]:
        logs = [path.read_text() for path in (folder / "run" / "trials" / f"{int(trial):04d}").glob("rank*.jsonl")]
        assert any("can't allocate memory" in log or "MemoryError" in log for log in logs)


def test_zero2_fits_where_zero0_does_not(tuned: tuple[Path, Finished]) -> None:
    table = pd.read_csv(tuned[0] / "run" / "trials.csv")
    fits = set(table[table["outcome"] == "fits"]["rung"])
    assert fits == {"zero2"}


def test_every_candidate_is_in_trials_csv_with_a_reason(tuned: tuple[Path, Finished]) -> None:
    table = pd.read_csv(tuned[0] / "run" / "trials.csv")
    rows = {(row.rung, bool(row.gradient_checkpointing), int(row.micro_batch)) for row in table.itertuples()}
    assert rows == CANDIDATES
    assert len(table) == len(CANDIDATES)
    assert table["why"].notna().all()
    assert list(table["status"]).count("answer") == 1
    assert set(table["status"]) <= {"answer", "measured", "pruned"}


def test_best_config_is_the_proven_answer_and_loads(tuned: tuple[Path, Finished]) -> None:
    folder, done = tuned
    config = load_best_config(folder / "best_config.json")
    section = config["ladder"]
    assert section["rung"] == "zero2"
    assert config["zero_optimization"]["stage"] == 2
    assert config["train_batch_size"] == 8
    assert section["proof"]["evaluation"] is True
    assert "auto" not in json.dumps(section)
    answer = pd.read_csv(folder / "run" / "trials.csv").query("status == 'answer'").iloc[0]
    assert (section["micro_batch"], section["gradient_checkpointing"]) == (
        answer["micro_batch"],
        answer["gradient_checkpointing"],
    )
    for suffix in ("json", "trainer.json", "accelerate.yaml", "launch.sh"):
        assert (folder / f"best_config.{suffix}").exists()
    assert "proven in fresh processes" in done.output


def test_the_same_command_again_starts_no_trial_and_gives_the_same_answer(tuned: tuple[Path, Finished]) -> None:
    folder, _ = tuned
    before, trials = (folder / "best_config.json").read_text(), trials_of(folder / "run")
    again = ladder(*TUNE, folder=folder)
    assert again.status == 0
    assert trials_of(folder / "run") == trials
    assert (folder / "best_config.json").read_text() == before
    assert "\ntrial " not in again.errors
    assert again.num_left == 0


def test_another_strategy_on_the_same_run_folder_uses_what_is_known(tuned: tuple[Path, Finished]) -> None:
    folder, _ = tuned
    trials = trials_of(folder / "run")
    walked = ladder(*TUNE, "--strategy", "walk", "--output", "walked.json", folder=folder)
    assert walked.status == 0
    assert load_best_config(folder / "walked.json")["ladder"]["rung"] == "zero2"
    # The walk's own steps may be new (zero0 without checkpointing was pruned); what was measured is not tried again.
    new = [name for name in trials_of(folder / "run") if name not in trials]
    keys = [
        candidate["key"]
        for name in new
        for candidate in json.loads((folder / "run" / "trials" / name / "spec.json").read_text())["candidates"]
    ]
    known = pd.read_csv(folder / "run" / "trials.csv")
    assert len(new) <= 1
    assert set(keys) <= {"zero0 ckpt=off mb=1"}, known


def test_another_workload_in_the_same_run_folder_is_refused(tuned: tuple[Path, Finished]) -> None:
    folder, _ = tuned
    other = ladder(*TUNE, "--seq-len", "32", folder=folder)
    assert other.status == 2
    assert "workload" in other.errors
    assert "--run-dir" in other.errors


def test_when_nothing_fits_the_status_is_three_and_the_sentence_says_what_came_closest(tmp_path: Path) -> None:
    done = ladder("tune", "tiny-llama", "--gpus", "0", "--gpu-memory", "150MiB", "--rung", "zero0", folder=tmp_path)
    assert done.status == 3, done.errors
    last = done.errors.strip().splitlines()[-1]
    assert last.startswith("ladder: Nothing fits in ")
    assert "rank" in last
    assert not (tmp_path / "best_config.json").exists()
    assert done.num_left == 0


HOSTILE = {**TINY_CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["tiny-llama", "--global-batch-size", "7"], 2, "--global-batch-size 6 or 8"),
        (["tiny-llama", "--micro-batch", "3"], 2, "possible are 1, 2, 4"),
        (["tiny-llama", "--seq-len", "9999"], 2, "2048 positions"),
        (["tiny-llama", "--nvme-path", "missing"], 2, "is not a folder"),
        (["tiny-llama", "--output", "missing/best_config.json"], 4, "cannot be written"),
        (["tiny-llama", "--output", "."], 4, "cannot be written"),
        (["tiny-llama", "--run-dir", "file/run"], 4, "--run-dir"),
        (["no-such-model"], 5, "bundled name"),
        (["./hostile"], 5, "auto_map"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_work_is_said_in_one_sentence_before_any_trial(
    tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "config.json").write_text(json.dumps(HOSTILE))
    (tmp_path / "file").touch()
    done = ladder("tune", "--gpus", "0", *arguments, folder=tmp_path)
    assert (done.status, done.output) == (status, "")
    last = done.errors.strip().splitlines()[-1]
    assert last.startswith("ladder: ")
    assert words in last
    assert not (tmp_path / "ladder-runs").exists()
    assert done.num_left == 0


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="for machines without GPUs")
def test_gpus_that_are_not_there_cannot_be_asked_for(tmp_path: Path) -> None:
    done = ladder("tune", "tiny-llama", "--gpus", "3", folder=tmp_path)
    assert done.status == 2
    assert "--gpus 0 (CPU)" in done.errors
