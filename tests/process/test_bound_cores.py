"""Ranks bound to cores of their own, in trials and under the launch script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Bench, tiny_trial
from helpers.answers import answer

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.emit.files import OutputPaths
from ladder.emit.plain import emit_plain, plain_output
from ladder.events.protocol import MeasuredEvent
from ladder.machine.cores import usable_by_place
from ladder.techniques.bound_cores import BIND_CORES

SCRIPT = Path(__file__).parents[1] / "scripts" / "plain_trainer.py"
HERE = usable_by_place()
SHARES = BIND_CORES.cores_of_ranks(HERE, 2)

pytestmark = pytest.mark.skipif(len(HERE) < 2, reason="two ranks need two cores")


@pytest.mark.parametrize("rung", ["zero1", "ddp"])
def test_each_rank_of_a_trial_runs_on_cores_of_its_own(warm_bench: Bench, tmp_path: Path, rung: str) -> None:
    spec = tiny_trial(tmp_path / "0001", 1, rung=rung, technique=BIND_CORES)
    run = warm_bench.run(spec)
    assert all(any(isinstance(event, MeasuredEvent) for event in events) for events in run.events)
    for rank, share in enumerate(SHARES):
        (said,) = re.findall(r"ladder: bound to cores \[(.*)\]", (tmp_path / f"0001/rank{rank}.log").read_text())
        assert [int(core) for core in said.split(", ")] == share


def test_the_launch_script_binds_each_rank_of_the_training(tmp_path: Path) -> None:
    usual = answer("zero1")
    workload = replace(usual.workload, global_batch_size=8)
    engine = Engine(RUNGS_BY_NAME["ddp"], techniques=(BIND_CORES,))
    candidate = Candidate(engine, checkpoint_every=1, micro_batch=2, accumulation=2)
    bound = replace(usual, workload=workload, candidate=candidate, world_size=2, device="cpu", gpu_name=None)
    emit_plain(bound, tmp_path / "best_config.json")
    launch = OutputPaths.beside(plain_output(tmp_path / "best_config.json")).launch
    own = [str(tmp_path), "--output_dir", str(tmp_path / "out"), "--max_steps", "1", "--report_to", "none"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(launch), "--trainer", str(SCRIPT), *own]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    # Not the status: in the interpreter's own end one of torch's threads now and then aborts the process.
    assert "'train_loss'" in done.stdout, done.stdout + done.stderr
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text())["cores"] for rank in (0, 1)] == SHARES
