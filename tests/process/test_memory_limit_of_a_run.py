"""`ladder run` holds a real training to the limit of its tune, until it is told not to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Finished, ladder, make_candidate, tiny_trial
from helpers.answers import answer
from helpers.scripts import MISBEHAVING

from ladder.emit import emit_all
from ladder.events.protocol import ScriptSpec
from ladder.trial.script import start
from ladder.units import GIB

OWN_SCRIPT = Path(__file__).parents[2] / "examples" / "own_script.py"
LIMIT = int(1.5 * GIB)
"""The training takes 0.4 GiB (measured), and `holds_more.py` another 2 GiB."""
SAID = "Each rank may use 1.50 GiB, as in the tune; --no-memory-limit lifts this limit."


def run(folder: Path, *options: str) -> Finished:
    """A training of two steps on one CPU rank, by a script that takes more than its tune saw."""
    tuned = answer(
        "zero2",
        workload={"seq_len": 256, "global_batch_size": 8},
        candidate=make_candidate("zero2", checkpointing=False, micro_batch=8, accumulation=1),
        world_size=1,
        device="cpu",
        gpu_name=None,
        memory_limit=LIMIT,
        is_limited=True,
        run_dir=folder / "run",
    )
    emit_all(tuned, folder / "best_config.json")
    return ladder(
        *("run", "best_config.json", *options, "--", str(MISBEHAVING / "holds_more.py"), str(OWN_SCRIPT)),
        *("--steps", "2"),
        folder=folder,
    )


def test_a_training_that_takes_more_than_the_limit_of_its_tune_ends_and_says_why(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.status == 1
    said = (done.output + done.errors).splitlines()
    assert said.count(SAID) == 1
    assert [line for line in said if line.startswith("It ran out of memory")] == [
        "It ran out of memory on a rank, in the script (zero2 ckpt=off mb=8). No measured candidate takes less; "
        "--no-memory-limit lets it take more than the tune's limit, if the device has more."
    ]
    assert not (tmp_path / "trained").exists()


def test_the_same_training_succeeds_without_the_limit(tmp_path: Path) -> None:
    done = run(tmp_path, "--no-memory-limit")
    assert done.status == 0, done.errors[-3000:]
    assert SAID not in (done.output + done.errors)
    assert list((tmp_path / "trained").glob("checkpoint-*"))


def test_on_a_gpu_each_rank_limits_torch_on_its_own_card_and_asks_for_nobody_else_s_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[tuple[str, float]] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: done.append(("device", index)))
    monkeypatch.setattr(start, "limit_torch", lambda room: done.append(("torch", room)))
    monkeypatch.setattr(start, "tell_deepspeed", lambda free: done.append(("deepspeed", free())))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: GIB)
    script = ScriptSpec(command=("train.py",), mode="run", torch_limit=20 * GIB)
    spec = replace(tiny_trial(Path("/run"), 1), device="cuda", script=script, memory_limit=24 * GIB)
    start.limit_run(spec, script)
    assert done == [("device", 3), ("torch", 20 * GIB), ("deepspeed", 19 * GIB)]
