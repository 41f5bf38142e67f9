"""A loop under `accelerate launch` keeps its gradient clipping: in the answer's file, and from its first step on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers import ladder
from helpers.scripts import SCRIPTS, folder_with_inputs

LAUNCH = ("accelerate", "launch", "--num_processes", "2", str(SCRIPTS / "clipped_loop.py"), "--max_grad_norm", "0.05")
TUNE = ("tune", "--gpus", "0", "--gpu-memory", "3GiB", "--rung", "zero2", "--micro-batch", "2")


@pytest.mark.night
def test_the_file_and_every_step_of_a_run_clip_to_what_the_loop_gives(tmp_path: Path, script_inputs: Path) -> None:
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    tune = ladder(*TUNE, "--", *LAUNCH, "--num_train_epochs", "40", folder=folder)
    assert tune.status == 0, tune.errors
    document = json.loads((folder / "best_config.json").read_text())
    assert (document["gradient_clipping"], document["ladder"]["workload"]["gradient_clipping"]) == (0.05, 0.05)
    run = ladder("run", "best_config.json", "--", *LAUNCH, "--max_train_steps", "5", folder=folder)
    assert run.status == 0, run.errors[-3000:]
    moved = [float(each) for each in re.findall(r"moved by (\S+)", run.output)]
    assert len(moved) == 5
    # By SGD with a rate of 1 the weights move as far as the clipped gradient is long.
    assert moved == pytest.approx([0.05] * len(moved), rel=0.01)
