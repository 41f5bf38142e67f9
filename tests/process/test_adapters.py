"""Adapters in real trials: every stage trains them, and what was predicted of them is what ranks hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import TINY, TINY_CONFIG, Bench, ladder, tiny_trial
from safetensors.torch import load_file

from ladder.events.protocol import FailedEvent, MeasuredEvent, TrialSpec
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

ADAPTERS = Lora(rank=4)
TINY_WORKLOAD = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=4)


def with_adapters(spec: TrialSpec, **changes: Any) -> TrialSpec:
    return spec.model_copy(update={"lora": ADAPTERS.for_peft(), **changes})


@pytest.mark.parametrize(
    ("rung", "load_in"), [("zero3", None), ("zero0", "8bit"), ("zero2", "4bit"), ("zero3", "4bit")]
)
def test_a_proof_trains_adapters_and_saves_and_loads_them_alone(
    warm_bench: Bench, tmp_path: Path, rung: str, load_in: str | None
) -> None:
    spec = tiny_trial(tmp_path / "0001", 1, rung=rung, proof=True, save_folder=str(tmp_path / "saved"))
    run = warm_bench.run(with_adapters(spec, load_in=load_in))
    failed = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    assert not failed, failed[0].traceback
    assert all(any(isinstance(event, MeasuredEvent) for event in events) for events in run.events)
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == replace(TINY_WORKLOAD, lora=ADAPTERS).weights.trained
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["r"] == ADAPTERS.rank


def test_an_answer_for_adapters_is_found_and_holds_when_it_is_verified(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    limits = ["--gpus", "0", "--gpu-memory", "2GiB", "--rung", "zero2", "--micro-batch", "1"]
    batch = ["--seq-len", "32", "--global-batch-size", "4"]
    done = ladder("tune", "config.json", *limits, *batch, "--lora", "r=4", "--load-in", "4bit", folder=tmp_path)
    assert done.status == 0, done.errors
    assert "trained by QLoRA with r=4" in done.errors
    section = json.loads((tmp_path / "best_config.json").read_text())["ladder"]
    assert Lora.from_peft(section["workload"]["lora"]) == ADAPTERS
    assert section["workload"]["load_in"] == "4bit"
    assert section["model"]["num_trained"] == replace(TINY_WORKLOAD, lora=ADAPTERS).weights.trained
    assert not [warning for warning in section["warnings"] if "not compared" in warning]
    verified = ladder("verify", "best_config.json", "--tolerance", "0.9", folder=tmp_path)
    assert verified.status == 0, verified.errors
    assert verified.num_left == 0
