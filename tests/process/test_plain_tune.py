"""Whole tunes without DeepSpeed on two CPU ranks, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import TINY_CONFIG, ladder

SMALL = ["--gpus", "0", "--gpu-memory", "2GiB", "--seq-len", "32", "--global-batch-size", "4", "--micro-batch", "1"]
PLAIN = {"best_plain.json", "best_plain.accelerate.yaml", "best_plain.trainer.json", "best_plain.launch.sh"}


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("best_")}


def compared_losses(folder: Path) -> list[str]:
    """The candidates of the trials that compared losses."""
    specs = [json.loads(file.read_text()) for file in sorted(folder.glob("ladder-runs/*/trials/*/spec.json"))]
    return [spec["candidates"][0]["key"] for spec in specs if spec["parity"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    return tmp_path


def test_deepspeeds_answer_is_found_first_and_names_what_is_faster_without_it(folder: Path) -> None:
    rungs = ["--rung", "zero2", "--rung", "ddp", "--tolerance", "0"]
    done = ladder("tune", "config.json", *SMALL, "--backend", "all", *rungs, folder=folder)
    assert done.status == 0, done.errors
    section = json.loads((folder / "best_config.json").read_text())["ladder"]
    assert section["rung"] == "zero2"
    assert compared_losses(folder).count("zero1 ckpt=off mb=1") == 1, "both are compared with the same"
    is_faster = "plain" in section
    assert (files_in(folder) >= PLAIN) == is_faster == ("Without DeepSpeed: ddp" in done.output)
    if is_faster:
        assert section["plain"]["tokens_per_second"] > section["tokens_per_second"]
