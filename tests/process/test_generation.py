"""Tunes of generation for real: CPU ranks that load a model in several ways, generate, and run out of memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import ladder
from helpers.processes import processes_with

pytestmark = pytest.mark.timeout(900)
ASKED = ["--task", "generate", "--gpus", "0", "--format", "json"]
SHORT = [*ASKED, "--prompt-len", "16", "--new-tokens", "4", "--batch", "2"]


def answer_of(folder: Path, *arguments: str) -> dict[str, Any]:
    done = ladder("tune", *arguments, folder=folder)
    assert done.status == 0, done.errors
    assert done.num_left == 0
    answer: dict[str, Any] = json.loads(done.output)["answer"]
    return answer


@pytest.mark.parametrize("model", ["tiny-llama", "opt-125m"])
def test_every_way_generates_the_same_tokens_and_the_fastest_is_proven(tmp_path: Path, model: str) -> None:
    ways = ["one", "zero3", "zero3+param-cpu"]
    answer = answer_of(tmp_path, model, *SHORT, *(word for way in ways for word in ("--way", way)))
    section = answer["ladder"]
    assert [(row["way"], row["outcome"]) for row in section["tried"]] == [(way, "fits") for way in ways]
    assert section["tokens_that_differ"] == 0
    assert section["compared_with"] != section["way"]
    (run,) = tmp_path.glob("ladder-runs/*")
    lines = [line for file in sorted(run.glob("trials/*/rank0.jsonl")) for line in file.read_text().splitlines()]
    events = [event for event in map(json.loads, lines) if event["kind"] == "generated"]
    tokens = [event["tokens"][:1] for event in events]  # rank 0 has the first prompt in every way
    assert all(len(row) == 4 for rows in tokens for row in rows)
    assert tokens == [tokens[0]] * 4  # the proof's too
    assert section["memory_gib"][0] > 0
    assert not list(tmp_path.glob("ladder-runs/*/weights"))
    again = ladder("tune", model, *SHORT, *(word for way in ways for word in ("--way", way)), folder=tmp_path)
    assert json.loads(again.output)["answer"] == answer
    assert "\ntrial " not in again.errors  # a run that is finished stays finished


def test_where_one_device_runs_out_of_memory_a_later_way_answers(tmp_path: Path) -> None:
    held = ["--gpu-memory", "140MiB", "--prompt-len", "256", "--new-tokens", "2", "--batch", "16"]
    answer = answer_of(tmp_path, "tiny-llama", *ASKED, *held, "--way", "one", "--way", "copies")
    first, second = answer["ladder"]["tried"]
    assert (first["way"], first["outcome"]) == ("one", "gpu_oom")
    assert "rank 0 reached its memory limit in generation" in first["why"]
    assert (second["way"], answer["ladder"]["way"]) == ("copies", "copies")


def test_an_interrupted_tune_leaves_no_process_and_no_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ladder.cli.main", "tune", "tiny-llama", *ASKED, "--new-tokens", "2000"]
    with (tmp_path / "errors").open("w") as errors:
        tune = subprocess.Popen([*command, "--prompt-len", "8"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors)
        until = time.monotonic() + 120
        while "trial 0002" not in (tmp_path / "errors").read_text() and time.monotonic() < until:
            time.sleep(0.2)
        marked = [each.environ()["LADDER_RUN_MARKER"] for each in _children(tune.pid) if _is_marked(each)]
        tune.send_signal(signal.SIGTERM)
        assert tune.wait(60) == 128 + signal.SIGTERM
    assert marked
    assert processes_with("LADDER_RUN_MARKER", marked[0]) == []
    assert not list(tmp_path.glob("ladder-runs/*/weights"))


def _children(pid: int) -> list[Any]:
    import psutil

    return psutil.Process(pid).children(recursive=True)


def _is_marked(process: Any) -> bool:
    return "LADDER_RUN_MARKER" in process.environ()


def test_a_run_of_generation_is_named_as_one_where_a_training_is_read(tmp_path: Path) -> None:
    answer_of(tmp_path, "tiny-llama", *SHORT, "--way", "one")
    (run,) = tmp_path.glob("ladder-runs/*")
    for command in (("report", str(run)), ("verify", "best_generation.json")):
        done = ladder(*command, folder=tmp_path)
        assert done.status == 2
        assert "generat" in done.errors
