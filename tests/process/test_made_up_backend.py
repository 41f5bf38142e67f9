"""A tune with the made-up backend's half in real ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import TINY_CONFIG
from helpers.made_up_backend import MADE_UP_BACKEND

import ladder
from ladder.backends.registry import BACKENDS
from ladder.emit import load_best_config


def test_a_backend_is_tried_compared_and_proven_in_ranks_that_only_the_specification_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    config, run, saved = tmp_path / "config.json", tmp_path / "run", tmp_path / "saved"
    config.write_text(json.dumps(TINY_CONFIG))
    with BACKENDS.including(MADE_UP_BACKEND):
        tuned = ladder.tune(
            str(config),
            rungs=["magic"],
            gpus=0,
            gpu_memory="2GiB",
            seq_len=32,
            global_batch_size=4,
            micro_batches=[1],
            run_dir=run,
            output=tmp_path / "best_config.json",
            save_weights=saved,
            quiet=True,
        )
        section = load_best_config(tmp_path / "best_plain.json")["ladder"]
    assert tuned.plain is not None
    assert section["rung"] == "magic"
    records = tuned.output.result.records
    assert {record.purpose for record in records if record.outcome.kind == "fits"} == {"measure", "proof"}
    assert (saved / "model.safetensors").is_file()
    logs = list(run.rglob("rank0.log"))
    said = [log for log in logs if "the made-up backend was here" in log.read_text()]
    assert len(said) >= 3, "the trial, the comparison of its losses, and the proof"
    assert len(logs) > len(said), "the engine that its losses are compared with"
