"""The NVMe rungs for real: async I/O on a file system of this machine, with the parameters and optimizer on it."""

from __future__ import annotations

import ctypes.util
import json
from pathlib import Path

import pandas as pd
import pytest

from ladder.cli.main import main
from ladder.emit import load_best_config

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(ctypes.util.find_library("aio") is None, reason="needs libaio"),
]

# Shards of two ranks are of at least 1 MiB, as DeepSpeed swaps no smaller ones, and more of them than it has buffers.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
}


def test_both_nvme_rungs_are_measured_proven_and_leave_no_swap_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nvme").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["tune", "config.json", "--gpus", "0", "--gpu-memory", "2GiB", "--nvme-path", "nvme"]
    arguments += ["--strategy", "exhaustive", "--documented", "--seq-len", "64", "--global-batch-size", "4"]
    arguments += ["--micro-batch", "1", "--rung", "zero3+opt-nvme", "--rung", "zero3+param-nvme+opt-nvme"]
    assert main([*arguments, "--run-dir", "run"]) == 0
    fits = pd.read_csv("run/trials.csv").query("outcome == 'fits'")
    assert set(fits["rung"]) == {"zero3+opt-nvme", "zero3+param-nvme+opt-nvme"}
    config = load_best_config(Path("best_config.json"))
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert list((tmp_path / "nvme").iterdir()) == []
