"""Activations that wait on the host: where they are tried, what that takes and saves, and how it is emitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import bundled_workload, make_record
from helpers.searches import space_of

from ladder.candidates import Candidate
from ladder.search.memory import predict_memory
from ladder.search.space import Space, ruled_out
from ladder.techniques.keys import candidate_of, engine_named
from ladder.units import GIB
from ladder.workload.workload import Workload

LONG = bundled_workload("llama-3.2-1b", seq_len=98304, global_batch_size=4)
ENGINE = engine_named("zero2+opt-cpu+liger")
KEPT, OFFLOADED = (candidate_of(f"{ENGINE.name} ckpt={kind} mb=1", 4) for kind in ("on", "cpu"))


def space_within(limit: float, **changes: Any) -> Space:
    usual = {"workload": LONG, "memory_limit": int(limit * GIB), "micro_batches": (1, 2), "checkpointing": ("cpu",)}
    return space_of(ENGINE, **usual | changes)


def offloading(space: Space) -> list[str]:
    return [candidate.key for candidate in space.candidates if candidate.offload_activations]


def peak(candidate: Candidate, workload: Workload = LONG) -> int:
    return predict_memory(workload, candidate, world_size=1, device="cuda").peak


def test_they_are_tried_where_checkpointing_alone_is_not_sure_to_make_the_smallest_micro_batch_fit() -> None:
    tight, hopeless, roomy = peak(KEPT) / GIB, 0.9 * peak(OFFLOADED) / GIB, 1.3 * peak(KEPT) / GIB
    assert offloading(space_within(tight)) == [OFFLOADED.key]
    assert offloading(space_within(hopeless)) == offloading(space_within(roomy)) == []


def test_they_are_not_tried_unless_transformers_can_nor_on_a_cpu_nor_with_an_encoder_and_a_decoder() -> None:
    tight = peak(KEPT) / GIB
    assert not offloading(space_within(tight, checkpointing=()))
    assert not offloading(space_within(tight, device="cpu"))
    both = replace(LONG, model=replace(LONG.model, is_encoder_decoder=True), task="seq2seq-lm")
    limit = 0.9 * peak(KEPT, both) / GIB
    assert not offloading(space_within(limit, workload=both))
    assert not space_within(limit, workload=both).ways_of_checkpointing


@pytest.mark.parametrize(
    ("key", "seq_len", "allocated"),
    [
        ("zero2+opt-cpu+liger ckpt=cpu mb=1", 98304, 12.80),
        ("zero3+param-cpu+opt-cpu+liger ckpt=cpu mb=1", 98304, 11.60),
        ("zero3+liger ckpt=cpu mb=1", 65536, 25.19),
        ("zero3+liger ckpt=on mb=1", 65536, 28.94),
        ("zero1+opt-cpu+liger ckpt=on mb=1", 65536, 13.60),
    ],
)
def test_what_an_h200_took_with_long_sequences_is_known_before_any_trial(
    key: str, seq_len: int, allocated: float
) -> None:
    """Allocated GiB in benchmarks/results/1xh200-more-rungs, nothing accumulated."""
    workload = replace(LONG, seq_len=seq_len, global_batch_size=1)
    predicted = predict_memory(workload, candidate_of(key, 1), world_size=1, device="cuda")
    assert max(predicted.moments.values()) / GIB == pytest.approx(allocated, rel=0.015)


def test_what_ran_out_with_them_does_so_without_but_not_the_other_way_round_nor_for_the_host_s_sake() -> None:
    space = space_within(peak(KEPT) / GIB)
    assert ruled_out(KEPT, space, [make_record(OFFLOADED, kind="gpu_oom")])
    assert not ruled_out(OFFLOADED, space, [make_record(KEPT, kind="gpu_oom")])
    assert not ruled_out(KEPT, space, [make_record(OFFLOADED, kind="host_oom")])


def test_where_they_save_little_they_are_tried_only_if_nothing_else_makes_it_fit() -> None:
    short = replace(LONG, seq_len=16384)
    kept, offloaded = peak(KEPT, short) / GIB, peak(OFFLOADED, short) / GIB
    assert kept - offloaded < 0.1 * kept
    assert offloading(space_within((kept + offloaded) / 2, workload=short)) == [OFFLOADED.key]
    assert not offloading(space_within(kept, workload=short))
