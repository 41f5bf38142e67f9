"""A user's own script on FSDP2 with two real GPUs: tuned, saved, resumed, and started with its answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import ladder
from helpers.scripts import SCRIPTS, folder_with_inputs
from safetensors.torch import load_file

from ladder.machine.gpus import visible_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(visible_gpus()) < 2, reason="needs two CUDA GPUs")]

TRAINER = f"{SCRIPTS}/causal_trainer.py --max_steps 3 --save_strategy steps"
LOOP = f"{SCRIPTS}/causal_loop.py --checkpointing_steps epoch --num_train_epochs"
DATA = "--model_name_or_path model --train_file text/train.jsonl --output_dir out"


@pytest.mark.parametrize(
    ("rung", "command", "run"),
    [("fsdp2", TRAINER, TRAINER), ("fsdp2+cpu", TRAINER, TRAINER), ("fsdp2+no-reshard", f"{LOOP} 40", f"{LOOP} 1")],
    ids=["fsdp2", "fsdp2+cpu", "fsdp2+no-reshard"],
)
def test_a_script_is_tuned_on_fsdp2_and_saves_the_whole_weights(
    rung: str, command: str, run: str, tmp_path: Path, script_inputs: Path
) -> None:
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    options = ["--gpus", "2", "--micro-batch", "4", "--backend", "torch", "--rung", rung, "--gpu-memory", "16GiB"]
    done = ladder("tune", *options, "--", *command.split(), *DATA.split(), folder=folder)
    assert done.status == 0, done.errors
    assert json.loads((folder / "best_plain.json").read_text())["ladder"]["rung"] == rung
    started = ladder("run", "best_plain.json", "--", *run.split(), *DATA.split(), folder=folder)
    assert started.status == 0, started.errors[-3000:]
    own, given = (load_file(folder / each / "model.safetensors") for each in ("out", "model"))
    assert {name: each.shape for name, each in own.items()} == {name: each.shape for name, each in given.items()}
    assert any(not own[name].equal(given[name].to(own[name].dtype)) for name in given), "it has trained"
