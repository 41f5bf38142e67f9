"""Ranks that share each sequence: where they can, where they have to, and what a tune then finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.searches import space_of

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.candidates import Candidate, Engine
from ladder.search.memory import expected_peak, predict_memory
from ladder.techniques.keys import candidate_of, engine_named
from ladder.techniques.ulysses import ULYSSES
from ladder.units import GIB
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

LLAMA = Workload(model=resolve_model("llama-3.1-8b"), task="causal-lm", seq_len=65536, global_batch_size=16)
ALONE, SHARED = engine_named("zero3+liger"), engine_named("zero3+liger+ulysses")


def of_model(**changes: Any) -> Workload:
    return replace(LLAMA, model=replace(LLAMA.model, **changes))


def test_ranks_that_share_take_one_sequence_after_the_other_to_the_same_global_batch() -> None:
    shared = candidate_of("zero3+ulysses ckpt=on mb=1", 16, 8)
    alone = candidate_of("zero3 ckpt=on mb=1", 16, 8)
    assert (shared.accumulation, alone.accumulation) == (16, 2)
    assert shared.sequences(8) == alone.sequences(8) == 16


def test_their_configuration_names_no_global_batch_which_the_trainer_would_hold_against_the_ranks() -> None:
    config = deepspeed_config(LLAMA, SHARED, micro_batch=1, accumulation=16, world_size=8, nvme_path=None)
    assert "train_batch_size" not in config
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 16)


@pytest.mark.parametrize(
    ("workload", "world_size", "can"),
    [
        (LLAMA, 8, True),
        (LLAMA, 1, False),
        (LLAMA, 6, False),  # 32 heads
        (LLAMA, 32, True),  # a key-value head for each four ranks
        (replace(LLAMA, seq_len=65537), 8, False),
        (of_model(num_kv_heads=6, num_heads=24), 8, False),
        (of_model(has_plain_attention=False), 8, False),
    ],
)
def test_sequences_are_shared_where_heads_divide_and_attention_sees_all_of_them(
    workload: Workload, world_size: int, can: bool
) -> None:
    limit = int(0.8 * needs(ALONE, replace(workload, seq_len=65536), world_size))
    assert sharing([ALONE], limit, workload, world_size) == ([SHARED] if can else [])


def sharing(engines: list[Engine], limit: int, workload: Workload = LLAMA, world_size: int = 8) -> list[Engine]:
    space = space_of(*engines, workload=workload, world_size=world_size, memory_limit=limit, micro_batches=(1,))
    return ULYSSES.engines(space, space.engines, space.predicted_peak)


def needs(engine: Engine, workload: Workload = LLAMA, world_size: int = 8) -> int:
    one = Candidate(engine, 1, 1, 16 * engine.ranks_of_a_sequence(world_size) // world_size)
    return expected_peak(workload, one, world_size=world_size, device="cuda")


def test_they_are_shared_on_the_rungs_with_no_room_for_one_and_with_room_for_its_part() -> None:
    # Below stage 3 the gradient would be too large, and what swaps to a drive was never tried so.
    plain = [ALONE, engine_named("zero3"), engine_named("zero2+liger"), engine_named("zero3+opt-nvme+liger")]
    assert sharing(plain, 40 * GIB) == [SHARED, engine_named("zero3+ulysses")]
    assert sharing(plain, 80 * GIB) == []  # on Liger's kernels the rung has room for it all
    assert sharing(plain[1:], 80 * GIB) == [engine_named("zero3+ulysses")]
    assert sharing(plain, 20 * GIB) == []  # nor for a part of it


@pytest.mark.parametrize(
    ("engine", "seq_len", "allocated_gib"),
    [
        ("zero3+liger", 65536, 21.608),
        ("zero3+liger+ulysses", 65536, 17.197),
        ("zero1+opt-cpu+liger+ulysses", 98304, 13.678),
        ("zero3+param-cpu+opt-cpu+liger+ulysses", 98304, 10.496),
    ],
)
def test_memory_on_two_gpus_is_predicted_within_3_percent(engine: str, seq_len: int, allocated_gib: float) -> None:
    """Llama-3.2-1B, benchmarks/results/2xh200-more-rungs."""
    model = resolve_model("llama-3.2-1b")
    workload = Workload(model=model, task="causal-lm", seq_len=seq_len, global_batch_size=4)
    candidate = candidate_of(f"{engine} ckpt=on mb=1", 4, 2)
    predicted = predict_memory(workload, candidate, world_size=2, device="cuda")
    assert max(predicted.moments.values()) / GIB == pytest.approx(allocated_gib, rel=0.03)
