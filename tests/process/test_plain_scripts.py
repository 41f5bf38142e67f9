"""A user's own script without DeepSpeed: tuned on ddp, started with its answer, and verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import ladder
from helpers.scripts import SCRIPTS, digest_of, files_in, folder_with_inputs

TRAINER = "{scripts}/causal_trainer.py --model_name_or_path model --train_file text/train.jsonl --output_dir out "
LOOP = "accelerate launch --num_processes 2 {scripts}/causal_loop.py --model_name_or_path model --output_dir out "
LOOP += "--train_file text/train.jsonl --checkpointing_steps epoch --num_train_epochs "
OWN = ("best_plain.",)


def words(command: str) -> list[str]:
    return command.format(scripts=SCRIPTS).split()


def options(*more: str) -> list[str]:
    return ["tune", "--gpus", "0", "--gpu-memory", "3GiB", "--micro-batch", "4", "--backend", "torch", *more, "--"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "run", "kind"),
    [
        pytest.param(f"{TRAINER} --max_steps 3 --save_strategy steps", "", "trainer", id="trainer"),
        pytest.param(f"{LOOP} 40", f"{LOOP} 1", "accelerate", id="accelerate", marks=pytest.mark.scripts),
    ],
)
def test_a_script_is_tuned_and_trains_on_ddp_as_it_is(
    command: str, run: str, kind: str, tmp_path: Path, script_inputs: Path
) -> None:
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    before = files_in(folder)
    done = ladder(*options("--rung", "ddp"), *words(command), folder=folder)
    assert done.status == 0, done.errors
    assert done.num_left == 0
    kept = {name: digest for name, digest in files_in(folder).items() if not name.startswith(OWN)}
    assert kept == before
    section = json.loads((folder / "best_plain.json").read_text())["ladder"]
    assert (section["rung"], section["script"]["kind"]) == ("ddp", kind)
    assert not (folder / "best_config.json").exists()
    started = ladder("run", "best_plain.json", *(["--", *words(run)] if run else []), folder=folder)
    assert started.status == 0, started.errors[-3000:]
    weights = folder / "out" / "model.safetensors"
    assert digest_of(weights) != digest_of(folder / "model" / "model.safetensors")
    verified = ladder("verify", "best_plain.json", "--tolerance", "0.9", folder=folder)
    assert verified.status == 0, verified.errors
