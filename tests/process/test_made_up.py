"""What is made up for these tests runs its half in real ranks, which only the specification tells of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import TINY_CONFIG, Bench, tiny_trial
from helpers.made_up import MADE_UP, including
from helpers.made_up_backend import MADE_UP_BACKEND

import ladder
from ladder.backends.registry import BACKENDS
from ladder.emit import load_best_config
from ladder.launch.base import Deadlines

TESTS = str(Path(__file__).parents[1])


@pytest.mark.night  # in tests/simulated it goes the same way, and test_plain_tune.py tunes another with real ranks
def test_a_backend_is_tried_compared_and_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
    config, run, saved = tmp_path / "config.json", tmp_path / "run", tmp_path / "saved"
    config.write_text(json.dumps(TINY_CONFIG))
    with including(BACKENDS, MADE_UP_BACKEND):
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


def test_a_rank_imports_the_half_of_a_technique(
    local_bench: Callable[..., Bench],
    trial_environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = trial_environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setitem(trial_environment, "PYTHONPATH", f"{TESTS}{os.pathsep}{before}")
    spec = replace(tiny_trial(tmp_path / "0001", 1), techniques=(MADE_UP.name,), rank_modules=(MADE_UP.rank_module,))
    with closing(local_bench().launcher) as launcher:
        run = launcher.run(spec, Deadlines(), lambda rank, event: None)
    assert set(run.exits.values()) == {0}
    assert "the made-up technique was here" in (tmp_path / "0001" / "rank0.log").read_text()
