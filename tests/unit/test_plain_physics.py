"""The simulator's physics of DDP and FSDP2, held against torch's rules and against what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import bundled_workload, tiny_trial

from ladder.backends.plain.config import plain_config
from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import Candidate, Engine
from ladder.simulation.host_memory import host_use
from ladder.simulation.kinds import Wrapped, assignment_of
from ladder.simulation.paper_machine import read_machine
from ladder.simulation.physics import Physics, Truth
from ladder.simulation.unit_gathering import units_gathered
from ladder.techniques.liger import LIGER
from ladder.units import GIB
from ladder.workload.workload import Workload

EXACT = read_machine("h200").model_copy(update={"surprise": 0.0, "rank_spread": 0.0, "num_cores": 32})
LLAMA = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64)
SMALL = bundled_workload("llama-3.2-1b", seq_len=2048, global_batch_size=64)
TINY = bundled_workload("opt-125m", seq_len=512, global_batch_size=32)
P = LLAMA.model.num_parameters


def candidate(rung: str, size: int = 1, every: int = 0, accumulation: int = 1, *, liger: bool = False) -> Candidate:
    engine = Engine(RUNGS_BY_NAME[rung])
    return Candidate(engine.having(LIGER) if liger else engine, every, size, accumulation)


def truth(each: Candidate, workload: Workload = LLAMA, ranks: int = 2) -> Truth:
    return Physics(EXACT.model_copy(update={"num_gpus": max(2, ranks)}), workload, ranks).truth(each)


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
    each = candidate(rung, size, accumulation=32 // size, liger=True)
    known = truth(each, SMALL)
    assert 64 * 2048 / known.step_seconds(each.accumulation) == pytest.approx(tokens_per_second, rel=0.05)
    if gib is not None:
        assert known.allocated / GIB == pytest.approx(gib, rel=0.05)


def test_a_small_model_is_almost_twice_as_fast_with_ddp_as_with_fsdp2() -> None:
    """Measured: 388,375 and 211,240 tokens/s."""
    ddp, fsdp2 = (truth(candidate(rung, 16), TINY).boundary_seconds for rung in ("ddp", "fsdp2"))
    assert fsdp2 / ddp == pytest.approx(388_375 / 211_240, rel=0.2)
    assert 32 * 512 / ddp == pytest.approx(388_375, rel=0.5)


def test_ddp_has_buckets_only_where_there_are_other_ranks() -> None:
    one, two = (truth(candidate("ddp", every=1), ranks=ranks).allocated for ranks in (1, 2))
    assert two - one == pytest.approx(4.0 * P, rel=0.01)
    assert one > 16.0 * P


def test_gradients_accumulate_in_fp32_with_ddp_and_whole_in_16_bits_with_fsdp2() -> None:
    """Read on two CPU ranks of torch 2.13 with accelerate's policy: FSDP2's unsharded gradients are bf16."""
    walks = {
        (rung, accumulation): truth(candidate(rung, every=1, accumulation=accumulation), ranks=8).allocated
        for rung in ("ddp", "fsdp2+cpu")
        for accumulation in (1, 4)
    }
    assert walks["fsdp2+cpu", 4] - walks["fsdp2+cpu", 1] == pytest.approx(2.0 * P, rel=0.1)
    assert 0 <= walks["ddp", 4] - walks["ddp", 1] < 4.0 * P  # without accumulation they are all there in the step


def test_autocast_forgets_its_copies_at_the_end_of_forward_where_blocks_are_recomputed() -> None:
    kept, again = (assignment_of(LLAMA, candidate("ddp", every=every), 1) for every in (0, 1))
    assert sum(each.casts for each in kept.network.blocks[0].operations) == pytest.approx(P / 33, rel=0.05)
    assert again.stream_bytes == 4.0
    assert assignment_of(LLAMA, candidate("fsdp2"), 8).stream_bytes == 2.0


def test_fsdp2_gathers_each_unit_twice_and_once_if_it_stays() -> None:
    twice, once = (units_gathered(assignment_of(LLAMA, candidate(rung), 4)) for rung in ("fsdp2", "fsdp2+no-reshard"))
    head = LLAMA.model.vocab_size * LLAMA.model.hidden_size
    assert sum(fetch.elements for fetch in once.fetches) == pytest.approx(P, rel=0.01)
    assert sum(fetch.elements for fetch in twice.fetches) == pytest.approx(2 * P - head, rel=0.01)
    assert all(fetch.issued <= fetch.needed for fetch in twice.fetches)
    block = LLAMA.model.num_block_parameters
    assert twice.live[10] == pytest.approx(2 * block, rel=0.01)  # one at work, and the next one or its buffer
    assert once.live[10] == pytest.approx(head + 10 * block + block, rel=0.05)
    assert not units_gathered(assignment_of(LLAMA, candidate("ddp"), 4)).fetches


def test_offloaded_shards_and_gradients_are_pinned_and_moments_are_not() -> None:
    use = host_use(assignment_of(LLAMA, candidate("fsdp2+cpu"), 4))
    assert 8.0 * P < use.pinned * 4 < 1.4 * 8.0 * P  # torch pins powers of two
    assert (use.offloaded - use.pinned) * 4 == pytest.approx(8.0 * P, rel=0.01)
    assert host_use(assignment_of(LLAMA, candidate("ddp"), 4)).offloaded == 0
    assert host_use(assignment_of(LLAMA, candidate("fsdp2"), 4)).offloaded * 4 == pytest.approx(4.0 * P, rel=0.01)


def test_ddp_reduces_beside_backward_and_only_in_the_last_micro_step() -> None:
    one, two = (truth(candidate("ddp", 8, accumulation=2), SMALL, ranks) for ranks in (1, 2))
    assert two.accumulate_seconds == pytest.approx(one.accumulate_seconds)
    alone = 2 * 4.0 * SMALL.model.num_parameters / 2 / EXACT.link_bytes
    assert 0 < two.boundary_seconds - one.boundary_seconds < 2 * alone


@pytest.mark.parametrize("rung", PLAIN_RUNGS, ids=lambda rung: rung.name)
def test_a_rung_is_known_again_by_its_configuration(rung) -> None:
    config = plain_config(LLAMA, Engine(rung), micro_batch=1, accumulation=1)
    spec = tiny_trial(Path("/run/trials/0001"), 1).model_copy(update={"deepspeed": config})
    assert Wrapped.engine_in(spec, PLAIN_RUNGS, LLAMA, ()) == Engine(rung)
    assert math.isfinite(truth(candidate(rung.name), ranks=8).boundary_seconds)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("rung", "within"), [("ddp", 0.01), ("fsdp2+no-reshard", 0.01), ("fsdp2", 0.015)])
def test_the_searchs_model_agrees_before_any_trial(rung: str, within: float, ranks: int) -> None:
    errors = []
    for workload in (LLAMA, SMALL, replace(TINY, seq_len=1024)):
        for every, size in ((0, 1), (1, 2), (2, 4)):
            each = candidate(rung, size, every, accumulation=2)
            moments = backend_of(each.engine.rung).moments(workload, each, ranks, "cuda")
            expected = max(sum(v for v in vars(moment).values() if isinstance(v, float)) for moment in moments)
            errors.append(abs(expected / truth(each, workload, ranks).allocated - 1))
    assert sum(errors) / len(errors) < within
