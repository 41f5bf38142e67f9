"""Scripts that compile kernels as they train."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers import ladder
from helpers.scripts import SCRIPTS

COMPILING_SECONDS = 2.0
"""That the script takes for each length."""


def events_of_the_proof(folder: Path) -> list[dict[str, Any]]:
    (run,) = (folder / "ladder-runs").iterdir()
    for trial in sorted((run / "trials").iterdir()):
        if json.loads((trial / "spec.json").read_text())["proof"]:
            return [json.loads(line) for line in (trial / "rank0.jsonl").read_text().splitlines()]
    raise AssertionError("there was no proof")


@pytest.mark.night  # a minute; tests/contracts/test_first_times.py sees what the proof asks
def test_a_proof_does_not_count_the_steps_in_which_kernels_were_compiled(tmp_path: Path) -> None:
    command = [str(SCRIPTS / "compiles.py"), "--output_dir", "out", "--per_device_train_batch_size", "1", "--use_cpu"]
    options = ["--gpus", "0", "--backend", "deepspeed", "--rung", "zero2", "--micro-batch", "1"]
    done = ladder("tune", *options, "--knobs", "0", "--", *command, folder=tmp_path)
    assert done.status == 0, done.errors
    events = events_of_the_proof(tmp_path)
    (began,) = (event["t"] for event in events if event.get("phase") == "measure")
    (measured,) = (event for event in events if event["kind"] == "measured")
    steps = [began, *(event["t"] for event in events if event["kind"] == "step" and event["t"] > began)]
    longest = max(later - earlier for earlier, later in pairwise(steps))
    assert longest > COMPILING_SECONDS, "a length came after the untimed steps"
    assert len(measured["boundary_seconds"]) >= 20
    assert max(measured["boundary_seconds"]) < COMPILING_SECONDS / 2
