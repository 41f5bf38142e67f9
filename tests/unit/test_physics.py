"""A step as it is described, held against torch's own programs, and machines that differ from it. See
test_recordings.py too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import bundled_workload
from helpers.shapes import SMALL as SMALL_SIZES

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Effects, Engine
from ladder.machine.machine_speed import machine_speed
from ladder.search.memory import predict_memory
from ladder.search.speed import predict_speed
from ladder.simulation.paper_machine import DIFFERENCES, read_machine
from ladder.simulation.physics import Physics, Truth
from ladder.step.counted import counted_block
from ladder.step.network import Network
from ladder.techniques.liger import LIGER
from ladder.units import GIB
from ladder.workload.lora import Lora
from ladder.workload.shapes import shape_from_config
from ladder.workload.source import resolve_model
from ladder.workload.workload import ModelShape, Workload

EXACT = read_machine("h200").model_copy(update={"surprise": 0.0, "rank_spread": 0.0})
TWO_H200 = machine_speed("NVIDIA H200", "cuda", 2, 32)
LLAMA = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64)
SMALL = bundled_workload("llama-3.2-1b", seq_len=2048, global_batch_size=32)
ADAPTERS = Lora(rank=16)
MIXTURE = shape_from_config(
    SMALL_SIZES
    | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 8}
    | {"model_type": "mixtral", "num_local_experts": 8, "num_key_value_heads": 4},
    name="mixture",
    source="file",
)


def truth(candidate: Candidate, workload: Workload = LLAMA, ranks: int = 4, **changes: object) -> Truth:
    machine = EXACT.model_copy(update={"num_gpus": max(2, ranks), **changes})
    return Physics(machine, workload, ranks).truth(candidate)


def having(workload: Workload = SMALL, **settings: Any) -> Workload:
    return replace(workload, **settings)


def network(workload: Workload) -> Network:
    return Network(workload, Effects(), counted_block(workload, (), "cuda"))


def test_a_machine_without_surprises_is_as_predicted() -> None:
    machine = EXACT.model_copy(update={"num_gpus": 4})
    physics = Physics(machine, LLAMA, 4)
    for rung, ckpt in (("zero2", 0), ("zero3+opt-cpu", 1), ("zero3+param-cpu", 2), ("fsdp2", 0)):
        candidate = Candidate(Engine(RUNGS_BY_NAME[rung]), ckpt, 2, 8)
        known = physics.truth(candidate)
        told = predict_speed(LLAMA, candidate, world_size=4, machine=physics.speed)
        assert known.accumulate_seconds == pytest.approx(told.accumulate_seconds)
        assert known.boundary_seconds == pytest.approx(told.boundary_seconds)
        memory = predict_memory(LLAMA, candidate, world_size=4, device="cuda")
        assert known.allocated == pytest.approx(max(memory.moments.values()), abs=1)
        assert known.host == pytest.approx(memory.host, abs=1)


def test_each_difference_makes_steps_slower_or_needs_more_memory() -> None:
    candidate = Candidate(Engine(RUNGS_BY_NAME["zero2"]), 0, 1, 16)
    usual = truth(candidate)
    found = {each: truth(candidate, differs=each) for each in DIFFERENCES}
    slower = {each for each, known in found.items() if known.boundary_seconds > 1.02 * usual.boundary_seconds}
    larger = {each for each, known in found.items() if known.device > 1.001 * usual.device}
    assert slower == {"no overlap", "half link", "slow host"}
    assert larger == {"fragments", "second copy"}


# DDP and FSDP2


def without_deepspeed(rung: str, size: int = 1, accumulation: int = 1, *, liger: bool = False) -> Candidate:
    engine = Engine(RUNGS_BY_NAME[rung])
    return Candidate(engine.having(LIGER) if liger else engine, 0, size, accumulation)


@pytest.mark.parametrize(
    ("rung", "size", "tokens_per_second", "gib"),
    [
        ("ddp", 32, 123_963, 123.0),
        ("fsdp2", 32, 135_882, 84.0),
        ("ddp", 8, 112_352, 51.0),
        ("fsdp2", 8, 124_014, None),
    ],
)
def test_llama_on_two_h200_is_as_fast_and_as_large_as_measured(
    rung: str, size: int, tokens_per_second: int, gib: float | None
) -> None:
    """Programs of torch alone, Liger's kernels. What FSDP2 accumulated was in fp32 there, so its memory is left out."""
    candidate, workload = without_deepspeed(rung, size, 32 // size, liger=True), having(global_batch_size=64)
    told = predict_speed(workload, candidate, world_size=2, machine=TWO_H200)
    assert told.tokens_per_second == pytest.approx(tokens_per_second, rel=0.06)
    if gib is not None:
        allocated = max(predict_memory(workload, candidate, world_size=2, device="cuda").moments.values())
        assert allocated / GIB == pytest.approx(gib, rel=0.05)


def test_a_small_model_is_almost_twice_as_fast_with_ddp_as_with_fsdp2() -> None:
    """Measured: 388,375 and 211,240 tokens/s."""
    tiny = bundled_workload("opt-125m", seq_len=512, global_batch_size=32)
    ddp, fsdp2 = (
        predict_speed(tiny, without_deepspeed(rung, 16), world_size=2, machine=TWO_H200).tokens_per_second
        for rung in ("ddp", "fsdp2")
    )
    assert ddp == pytest.approx(388_375, rel=0.12)
    assert fsdp2 == pytest.approx(211_240, rel=0.12)


# What is trained in part


@pytest.mark.parametrize(
    "settings",
    [
        {"lora": ADAPTERS},
        {"lora": ADAPTERS, "load_in": "4bit"},
        {"lora": Lora(rank=8, targets=("q_proj", "v_proj"))},
        {"lora": Lora(rank=8, dora=True)},
        {"freeze": ("*.embed_tokens", "*.decoder.embed_tokens")},
        {"freeze": ("model.layers.[0-7]", "model.decoder.layers.[0-7]")},
        {"freeze": ("model.layers.*.self_attn", "model.decoder.layers.*.fc1")},
        {},
    ],
)
@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b", "opt-1.3b", MIXTURE])
def test_the_gradients_of_the_operations_are_those_of_what_is_trained(
    model: str | ModelShape, settings: dict[str, Any]
) -> None:
    shape = resolve_model(model) if isinstance(model, str) else model
    if shape is MIXTURE and settings.get("lora") == Lora(rank=8, dora=True):
        settings = {}  # peft has none for experts
    own = having(model=shape, **settings)
    known = network(own)
    gradients = sum(block.trained for block in known.blocks) + known.trained_table + sum(known.last_norm.gradients)
    gradients += 0 if own.model.tied else known.trained_head
    assert gradients == pytest.approx(own.weights.trained, rel=0.02)
