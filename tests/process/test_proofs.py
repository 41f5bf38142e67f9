"""A proof of any engine in real ranks evaluates, and saves all that was trained: whole weights, or adapters alone."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, TINY_CONFIG, Bench, ladder, tiny_trial
from helpers.engines import engine_trial, failures, measured
from helpers.families import FAMILIES as COUNTED_MODELS
from helpers.shapes import FAMILIES as SMALL_MODELS
from safetensors.torch import load_file

from ladder.backends.plain.backend import PLAIN
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.events.protocol import PhaseEvent
from ladder.launch.counting import counting
from ladder.techniques.hpz import Hpz
from ladder.workload.lora import Lora, lora_from_text
from ladder.workload.shapes import shape_from_config
from ladder.workload.trained import LoadIn
from ladder.workload.workload import Workload

ADAPTERS = Lora(rank=4)
TINY_WORKLOAD = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=4)
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "num_experts_per_tok": 1}
MIXTURES: list[dict[str, Any]] = [
    {"model_type": "mixtral", "num_local_experts": 4, **SMALL},  # which DeepSpeed knows, so that it is a leaf
    {"model_type": "olmoe", "num_experts": 8, **SMALL},  # which it does not
]
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = [path for path in folder.iterdir() if path.suffix in (".bin", ".safetensors")]
    weights: dict[str, torch.Tensor] = torch.load(file, weights_only=True) if file.suffix == ".bin" else load_file(file)
    return weights


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "micro_batches", "ranks"),
    [
        *((plain, (1, 2), 2) for plain in ("ddp", "fsdp2", "fsdp2+no-reshard")),
        pytest.param("ddp+compile", (1, 2), 2, marks=pytest.mark.night),  # test_losses.py compiles the whole model
        pytest.param("fsdp2+compile", (1,), 2, marks=pytest.mark.night),
        pytest.param("fsdp2+fp8", (1,), 2, marks=needs_torchao),
        ("zero3+ulysses", (1,), 2),
        ("zero3+hpz=2", (1,), 4),  # as on two nodes
        ("fsdp2+hybrid=2", (1,), 4),
    ],
)
def test_a_proof_evaluates_and_saves_the_whole_weights(
    warm_bench: Bench, tmp_path: Path, engine: str, micro_batches: tuple[int, ...], ranks: int
) -> None:
    sizes = {"ranks": ranks, "accumulation": 3 if "hpz" in engine else 2}
    spec = engine_trial(tmp_path / "0001", engine, *micro_batches, **sizes)
    run = warm_bench.run(replace(spec, proof=True, save_folder=str(tmp_path / "saved")))
    first, second, *_ = measured(run)
    for events in run.events:
        assert {"evaluation", "gather"} <= {event.phase for event in events if isinstance(event, PhaseEvent)}
    for event in first if "compile" in engine else ():
        assert event.compile_seconds is not None
        assert max(event.boundary_seconds) < max(1.0, event.compile_seconds), "compiling is no part of a step"
    if "ulysses" in engine:
        assert first[0].losses == second[0].losses
    weights = saved_in(tmp_path / "saved")
    assert not any("_orig_mod" in name for name in weights)
    assert sum(weight.numel() for weight in weights.values()) == TINY.num_parameters


@pytest.mark.parametrize(
    ("rung", "load_in", "prepare_kbit"),
    [
        ("zero3", None, False),
        ("zero0", "8bit", False),
        ("zero2", "4bit", True),
        ("zero3", "4bit", False),
        ("zero3", "4bit", True),
        ("ddp", None, False),
        ("ddp", "4bit", True),
        ("fsdp2", None, False),
        ("fsdp2", "4bit", False),
        ("fsdp2", "4bit", True),
    ],
)
def test_a_proof_trains_adapters_and_saves_and_loads_them_alone(
    warm_bench: Bench, tmp_path: Path, rung: str, load_in: LoadIn | None, prepare_kbit: bool
) -> None:
    spec = tiny_trial(tmp_path / "0001", 1, rung=rung, proof=True, save_folder=str(tmp_path / "saved"))
    measured(warm_bench.run(replace(spec, lora=ADAPTERS.for_peft(), load_in=load_in, prepare_kbit=prepare_kbit)))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == replace(TINY_WORKLOAD, lora=ADAPTERS).weights.trained
    assert json.loads((tmp_path / "saved" / "adapter_config.json").read_text())["r"] == ADAPTERS.rank


def test_an_answer_for_adapters_is_found_and_holds_when_it_is_verified(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    limits = ["--gpus", "0", "--gpu-memory", "2GiB", "--rung", "zero2", "--micro-batch", "1", "--documented"]
    batch = ["--seq-len", "32", "--global-batch-size", "4"]
    copied = "r=4,modules_to_save=lm_head"
    done = ladder("tune", "config.json", *limits, *batch, "--lora", copied, "--load-in", "4bit", folder=tmp_path)
    assert done.status == 0, done.errors
    assert "trained by QLoRA with r=4" in done.errors
    section = json.loads((tmp_path / "best_config.json").read_text())["ladder"]
    assert Lora.from_peft(section["workload"]["lora"]) == lora_from_text(copied)
    assert section["workload"]["load_in"] == "4bit"
    head = TINY.vocab_size * TINY.hidden_size
    assert section["model"]["num_trained"] == replace(TINY_WORKLOAD, lora=ADAPTERS).weights.trained + head
    assert not [warning for warning in section["warnings"] if "not compared" in warning]
    verified = ladder("verify", "best_config.json", "--tolerance", "0.9", folder=tmp_path)
    assert verified.status == 0, verified.errors
    assert verified.num_left == 0


@pytest.mark.parametrize("config", MIXTURES, ids=lambda config: config["model_type"])
def test_a_mixture_is_proven_at_stage_3_on_ranks_whose_tokens_pick_other_experts(
    warm_bench: Bench, tmp_path: Path, config: dict[str, Any]
) -> None:
    """All ranks must gather the same weights, though each token picks its own."""
    spec = tiny_trial(tmp_path / "0001", 1, rung="zero3", proof=True)
    measured(warm_bench.run(replace(spec, model_config_json=config)))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bert", SMALL_MODELS["bert"]),
        ("bert", SMALL_MODELS["bert untied"]),
        ("t5", SMALL_MODELS["mt5"] | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}),
        ("electra", COUNTED_MODELS["electra"] | {"pad_token_id": 0}),
    ],
)
def test_fsdp2_fails_with_the_models_that_it_is_not_tried_with_and_with_no_other(
    warm_bench: Bench, tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    shape = shape_from_config(config, name=name, source="file", count=counting())
    task = shape.task
    spec = tiny_trial(tmp_path / "0001", 1, rung="fsdp2")
    run = warm_bench.run(replace(spec, model_config_json=config, task=task, seq_len=32))
    workload = Workload(model=shape, task=task, seq_len=32, global_batch_size=4)
    is_refused = "belong to two" in PLAIN.obstacle(workload, RUNGS_BY_NAME["fsdp2"])
    assert bool(failures(run)) is is_refused
    assert is_refused is (name != "electra")
    assert PLAIN.obstacle(workload, RUNGS_BY_NAME["ddp"]) == ""


def test_a_rank_whose_deepspeed_keeps_no_copy_of_the_weights_in_its_node_says_so(
    warm_bench: Bench, tmp_path: Path
) -> None:
    alone = Hpz(1)  # DeepSpeed's default
    run = warm_bench.run(tiny_trial(tmp_path / "0001", 1, rung="zero3", technique=alone, ranks=4, accumulation=3))
    assert "no copy of the weights" in failures(run)[0].message
