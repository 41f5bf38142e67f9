"""The NVMe rungs for real: async I/O on a file system of this machine, with the parameters and optimizer on it."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pandas as pd
import pytest

from ladder.cli.main import main
from ladder.emit import load_best_config

pytestmark = [
    pytest.mark.nvme,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ctypes.util.find_library("aio") is None, reason="needs libaio"),
]


def test_both_nvme_rungs_are_measured_proven_and_leave_no_swap_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nvme").mkdir()
    arguments = ["tune", "tiny-llama", "--gpus", "0", "--gpu-memory", "1GiB", "--nvme-path", "nvme"]
    arguments += ["--micro-batch", "1", "--rung", "zero3+opt-nvme", "--rung", "zero3+param-nvme+opt-nvme"]
    assert main([*arguments, "--run-dir", "run"]) == 0
    fits = pd.read_csv("run/trials.csv").query("outcome == 'fits'")
    assert set(fits["rung"]) == {"zero3+opt-nvme", "zero3+param-nvme+opt-nvme"}
    config = load_best_config(Path("best_config.json"))
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert list((tmp_path / "nvme").iterdir()) == []
