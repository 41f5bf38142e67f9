"""A user's own script without DeepSpeed: tuned, started with its answer, and verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import ladder
from helpers.scripts import SCRIPTS, digest_of, files_in, folder_with_inputs
from safetensors.torch import load_file

TRAINER = "{scripts}/causal_trainer.py --model_name_or_path model --train_file text/train.jsonl --output_dir out "
TRAINER += "--save_strategy steps --max_steps"
LOOP = "accelerate launch --num_processes 2 {scripts}/causal_loop.py --model_name_or_path model --output_dir out "
LOOP += "--train_file text/train.jsonl --checkpointing_steps epoch --num_train_epochs "
OWN = ("best_plain.",)


def words(command: str) -> list[str]:
    return command.format(scripts=SCRIPTS).split()


def options(*more: str) -> list[str]:
    return ["tune", "--gpus", "0", "--gpu-memory", "3GiB", "--micro-batch", "4", *more, "--"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rung", "command", "run", "kind"),
    [
        pytest.param("ddp", f"{TRAINER} 3", f"{TRAINER} 20", "trainer", marks=pytest.mark.night),
        pytest.param("fsdp2", f"{TRAINER} 3", f"{TRAINER} 20", "trainer", marks=pytest.mark.night),
        pytest.param("ddp", f"{LOOP} 40", f"{LOOP} 2", "accelerate", marks=pytest.mark.night),
        pytest.param("fsdp2+no-reshard", f"{LOOP} 40", f"{LOOP} 2", "accelerate", marks=pytest.mark.night),
    ],
)
def test_a_script_is_tuned_and_trains_without_deepspeed_as_it_is(
    rung: str, command: str, run: str, kind: str, tmp_path: Path, script_inputs: Path
) -> None:
    folder = folder_with_inputs(tmp_path / "home", script_inputs)
    before = files_in(folder)
    done = ladder(*options("--backend", "torch", "--rung", rung), *words(command), folder=folder)
    assert done.status == 0, done.errors
    assert done.num_left == 0
    kept = {name: digest for name, digest in files_in(folder).items() if not name.startswith(OWN)}
    assert kept == before
    section = json.loads((folder / "best_plain.json").read_text())["ladder"]
    assert (section["rung"], section["script"]["kind"]) == (rung, kind)
    assert not (folder / "best_config.json").exists()
    started = ladder("run", "best_plain.json", *(["--", *words(run)] if run else []), folder=folder)
    assert started.status == 0, started.errors[-3000:]
    assert kind != "trainer" or "20/20 [" in started.errors
    weights = folder / "out" / "model.safetensors"
    assert digest_of(weights) != digest_of(folder / "model" / "model.safetensors")
    own, given = (load_file(each) for each in (weights, folder / "model" / "model.safetensors"))
    assert {name: each.shape for name, each in own.items()} == {name: each.shape for name, each in given.items()}
    verified = ladder("verify", "best_plain.json", "--tolerance", "0.9", folder=folder)
    assert verified.status == 0, verified.errors
