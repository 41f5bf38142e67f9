"""`ladder run --step-down` when memory really runs out: another program leaves a training less than the tune had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import Finished, ladder
from helpers.scripts import SCRIPTS

SCRIPT = str(SCRIPTS / "long_texts_last.py")
TUNE = ("tune", "--gpus", "0", "--gpu-memory", "3GiB", "--rung", "zero2", "--micro-batch", "16", "--documented")
ENOUGH_WHERE_LAYERS_ARE_RECOMPUTED = "150"
"""MiB. Measured: the long texts take 220 without checkpointing, and 110 with it."""
RAN_OUT = "It ran out of memory on a rank, in forward (zero2 ckpt=off mb=16)."

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step down")
    done = ladder(*TUNE, "--strategy", "exhaustive", "--", SCRIPT, folder=folder)
    assert done.status == 0, done.errors
    return folder


@pytest.fixture
def short_of_memory(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if json.loads((tuned / "best_config.json").read_text())["ladder"]["gradient_checkpointing"]:
        pytest.skip("on this machine recomputing the layers was faster, so there is nothing to step down to")
    monkeypatch.setenv("HEADROOM_MIB", ENOUGH_WHERE_LAYERS_ARE_RECOMPUTED)
    return tuned


def told(done: Finished) -> list[str]:
    return [line for line in (done.output + done.errors).splitlines() if line.startswith("It ran out of memory")]


def state_in(folder: Path) -> Any:
    return json.loads((folder / "trainer_state.json").read_text())


def test_a_training_steps_down_and_goes_on_from_its_last_checkpoint_with_the_same_batch(short_of_memory: Path) -> None:
    words = ["--", SCRIPT, "--output_dir", "resumed"]
    done = ladder("run", "best_config.json", "--step-down", *words, folder=short_of_memory)
    assert done.status == 0, done.errors[-3000:]
    assert done.num_left == 0
    less = "zero2 ckpt=on mb=16 was measured with less"
    assert told(done) == [f"{RAN_OUT} {less}: going on with it from the last checkpoint, with the same global batch."]
    before, after = (state_in(short_of_memory / "resumed" / f"checkpoint-{step}") for step in (6, 8))
    limit = "Each rank may use 3.00 GiB, as in the tune; --no-memory-limit lifts this limit."
    assert (done.output + done.errors).splitlines().count(limit) == 1
    assert after["log_history"][:6] == before["log_history"]
    assert [after["global_step"], after["epoch"], after["train_batch_size"]] == [8, 1.0, 16]
