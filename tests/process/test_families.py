"""Models of many families, planned and tuned for real; what cannot be trained is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import ladder
from helpers.families import FAMILIES

PLAN = ("plan", "model", "--gpus", "2", "--gpu-memory", "4GiB", "--seq-len", "64", "--global-batch-size", "8")
TUNE = ("tune", "model", "--gpus", "0", "--gpu-memory", "2GiB", "--rung", "zero2", "--micro-batch", "1")
WORKLOAD = (
    "--seq-len",
    "32",
    "--global-batch-size",
    "2",
    "--run-dir",
    "run",
    "--strategy",
    "exhaustive",
    "--documented",
)


def write_model(folder: Path, config: dict[str, Any]) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trial_trains_the_model_on_tokens_alone(name: str) -> None:
    from ladder.trial.model import build_model, make_batch, set_checkpointing
    from ladder.trial.model_class import model_config, tasks_of

    task = tasks_of(model_config(FAMILIES[name]))[0]
    spec: Any = SimpleNamespace(
        seed=0,
        model_config_json=FAMILIES[name],
        parity=False,
        zero_stage=2,
        device="cpu",
        task=task,
        dtype="bf16",
        seq_len=16,
        techniques=(),
        rank_modules=(),
        lora=None,
        load_in=None,
        freeze=(),
    )
    model = build_model(spec, torch.bfloat16, "cpu")
    every = 1 if model.supports_gradient_checkpointing else 0
    set_checkpointing(model, SimpleNamespace(checkpoint_every=every, offload_activations=False))  # type: ignore[arg-type]
    vocabulary = model.config.get_text_config().vocab_size
    loss = model(**make_batch(spec, vocabulary, 2, torch.Generator().manual_seed(0))).loss
    loss.backward()
    assert 0 < loss.item() < 20
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.night  # test_hold.py has a module that cannot; a step of each family is above
@pytest.mark.usefixtures("trial_environment")
@pytest.mark.parametrize(("name", "checkpointing"), [("albert", {"off"}), ("qwen2_vl", {"on", "off"})])
def test_a_model_is_tuned_on_text_with_checkpointing_if_it_can(
    tmp_path: Path, name: str, checkpointing: set[str]
) -> None:
    write_model(tmp_path, FAMILIES[name])
    done = ladder(*TUNE, *WORKLOAD, folder=tmp_path)
    assert done.status == 0, done.errors
    table = pd.read_csv(tmp_path / "run" / "trials.csv")
    assert set(table["checkpointing"]) == checkpointing
    assert "fits" in set(table["outcome"])
    assert not set(table["outcome"]) & {"crash", "hang"}
    assert table["predicted_device_gib"].notna().all()
    answer = json.loads((tmp_path / "best_config.json").read_text())
    assert answer["ladder"]["environment"]["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"


def test_without_torch_a_bundled_model_is_planned_and_another_one_says_what_is_missing(tmp_path: Path) -> None:
    """A finder that hides torch stands for an environment without it: removing it here would end all other tests."""
    write_model(tmp_path, FAMILIES["gemma3"])
    hidden = (
        "import sys, importlib.util as util; find = util.find_spec;"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest);"
        "from ladder.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    other, bundled = (
        subprocess.run(
            [sys.executable, "-c", hidden, "plan", model, *PLAN[2:]],
            check=False,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        for model in ("model", "tiny-llama")
    )
    assert bundled.returncode == 0, bundled.stderr
    assert other.returncode != 0
    assert "torch and transformers, which count it, are not installed for" in other.stderr
    assert "--python" in other.stderr


def test_fp16_on_a_cpu_without_it_is_refused_before_any_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # what an older CPU has
    done = ladder("tune", "tiny-llama", "--gpus", "0", "--dtype", "fp16", "--run-dir", "run", folder=tmp_path)
    assert done.status == 2
    assert done.errors.splitlines()[-1] == (
        "ladder: This CPU cannot train in fp16, which needs AVX512-FP16 instructions; use --dtype bf16."
    )
    assert not (tmp_path / "run").exists()
