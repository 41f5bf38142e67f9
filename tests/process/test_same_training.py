"""`ladder run` makes the training that the script makes by itself, at the same global batch: step by step."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ladder
from helpers.answers import answer
from helpers.rehearsals import Rehearsals, rehearsals_of_held

from ladder.emit import emit_all
from ladder.techniques.keys import candidate_of

SCRIPT = "logs_its_training.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str]) -> Iterator[Rehearsals]:
    """A folder with the scripts, which is also the working folder, and a server for all looks."""
    with rehearsals_of_held(tmp_path_factory.mktemp("same"), trial_environment) as held:
        yield held


def tuned(home: Rehearsals, key: str, *command: str) -> tuple[Path, Any]:
    """Writes the answer with the candidate `key` for `command`; its file, and what a look found of the command."""
    script = home.look(*command)
    workload = home.workload(script)
    found = dataclasses.replace(
        answer(),
        workload=workload,
        candidate=candidate_of(key, workload.global_batch_size, 2),
        world_size=2,
        device="cpu",
        gpu_name=None,
        run_dir=home.home / "run",
    )
    file, *_ = emit_all(found, home.home / "best_config.json")
    return file, script.facts


def logged(home: Rehearsals) -> list[list[dict[str, Any]]]:
    """What each rank wrote down; the next training begins a new one."""
    files = sorted((home.home / "logs").glob("rank*.jsonl"))
    found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    shutil.rmtree(home.home / "logs")
    return found


@pytest.mark.parametrize(
    ("way", "key"),
    [
        ("no_trainer", "zero2 ckpt=off mb=4"),
        pytest.param("instruct", "ddp ckpt=off mb=2", marks=pytest.mark.night),
        ("trainer", "zero1 ckpt=off mb=4"),
        pytest.param("raw_deepspeed", "zero2 ckpt=off mb=4", marks=pytest.mark.night),
        pytest.param("deepspeed_loads", "zero2 ckpt=off mb=4", marks=pytest.mark.night),  # proven below
        pytest.param("sft", "zero2 ckpt=off mb=2", marks=pytest.mark.night),
        pytest.param("dpo", "ddp ckpt=off mb=4", marks=pytest.mark.night),
        pytest.param("reward", "zero1 ckpt=off mb=2", marks=pytest.mark.night),
        pytest.param("sentences", "zero1 ckpt=off mb=2", marks=pytest.mark.night),
    ],
)
def test_steps_samples_and_learning_rates_are_those_of_the_script_s_own_training(
    way: str, key: str, home: Rehearsals
) -> None:
    if way in ("sft", "dpo", "reward"):
        pytest.importorskip("trl")
    if way == "sentences":
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    file, facts = tuned(home, key, SCRIPT, way)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    own = subprocess.run(
        [*TORCHRUN, SCRIPT, way],
        cwd=home.home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert own.returncode == 0, own.stderr[-3000:]
    by_itself = logged(home)
    done = ladder("run", file.name, folder=home.home)
    assert done.status == 0, done.output + done.errors
    under_the_answer = logged(home)
    assert len(by_itself) == len(under_the_answer) == 2
    for own_steps, steps in zip(by_itself, under_the_answer, strict=True):
        assert len(own_steps) == (32 if way == "trainer" else 24)
        assert [len(step["rows"]) for step in steps] == [len(step["rows"]) for step in own_steps]
        assert [step["lr"] for step in steps] == pytest.approx([step["lr"] for step in own_steps])
    for own_pair, pair in zip(zip(*by_itself, strict=True), zip(*under_the_answer, strict=True), strict=True):
        assert sorted(pair[0]["rows"] + pair[1]["rows"]) == sorted(own_pair[0]["rows"] + own_pair[1]["rows"])
    if facts.kind == "trainer":
        assert facts.planned_steps == 24
    else:
        assert facts.schedule_steps in (24, 48, None)  # None where it is prepared once the look is over


def test_a_loader_that_drops_its_last_batch_may_drop_more_in_another_micro_batch(home: Rehearsals) -> None:
    assert home.look(SCRIPT, "drops_last").facts.planned_steps == 27
    assert home.trial(SCRIPT, "drops_last", key="ddp ckpt=off mb=4", proof=True).said == "", "it plans 24 steps"


def test_a_trial_accumulates_less_than_its_training_and_is_not_compared_with_it(home: Rehearsals) -> None:
    assert home.trial(SCRIPT, "no_trainer", key="zero2 ckpt=off mb=1").said == "", "it plans 48 steps"


def test_a_loop_on_the_loader_that_deepspeed_makes_is_measured_and_proven(home: Rehearsals) -> None:
    assert home.look(SCRIPT, "deepspeed_loads").facts.num_samples == 64
    for proof in (False, True):
        done = home.trial(SCRIPT, "deepspeed_loads", key="zero1 ckpt=off mb=2", proof=proof)
        assert (done.said, done.measured) == ("", 2)
