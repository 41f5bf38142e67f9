"""The bytes of each moment, counted by hand: what DeepSpeed copies is there when it is at its fullest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ladder.backends.base import Moment
from ladder.backends.deepspeed.config import engine_knobs
from ladder.backends.deepspeed.moments import moments_of, offloaded
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.workload.workload import Workload

Build = Callable[..., Workload]


def candidate(rung: str, accumulation: int = 2) -> Candidate:
    return Candidate(Engine(RUNGS_BY_NAME[rung]), 1, 1, accumulation)


def moments(workload: Workload, tried: Candidate, world_size: int) -> dict[str, list[Moment]]:
    found: dict[str, list[Moment]] = {}
    for moment in moments_of(workload, tried, world_size, "cuda"):
        found.setdefault(moment.name, []).append(moment)
    return found


def most_buffers(workload: Workload, rung: str, world_size: int) -> float:
    return max(moment.buffers for moment in moments_of(workload, candidate(rung), world_size, "cuda"))


def test_several_gpus_at_stage_0_copy_gradients_to_reduce_them_and_one_gpu_does_not(llama_like: Build) -> None:
    workload = llama_like(1)
    assert workload.model.num_parameters < 500_000_000, "all gradients were to fit into one bucket of DeepSpeed's"
    copied = most_buffers(workload, "zero0", 4) - most_buffers(workload, "zero0", 1)
    assert copied == 2.0 * workload.model.num_parameters


def test_a_copy_to_reduce_at_stage_0_is_never_larger_than_deepspeed_s_bucket(llama_like: Build) -> None:
    copied = most_buffers(llama_like(32), "zero0", 4) - most_buffers(llama_like(32), "zero0", 1)
    assert copied == 2.0 * 500_000_000


@pytest.mark.parametrize("rung", ["zero1", "zero2"])
def test_several_gpus_at_stages_1_and_2_copy_a_full_bucket_to_reduce_it(llama_like: Build, rung: str) -> None:
    workload, many = llama_like(32), 64
    bucket = 2.0 * engine_knobs(workload, Engine(RUNGS_BY_NAME[rung]), many)["reduce_bucket_size"]
    assert bucket > 2.0 * workload.model.num_parameters / many, "the copy was to be larger than a rank's own gradients"
    buffers = [moment.buffers for moment in moments(workload, candidate(rung), many)["backward"]]
    assert max(buffers) - min(buffers) == bucket


def test_with_overlap_two_buckets_are_filled_in_turn(llama_like: Build) -> None:
    workload = llama_like(32)

    def with_overlap(overlap: bool) -> float:
        knobs = (("overlap_comm", overlap), ("reduce_bucket_size", 1_000_000_000))
        tried = Candidate(Engine(RUNGS_BY_NAME["zero2"], knobs), 1, 1, 2)
        return min(moment.buffers for moment in moments(workload, tried, 4)["backward"])

    assert with_overlap(True) - with_overlap(False) == 2.0 * 1_000_000_000


def test_stage_1_keeps_all_gradients_until_backward_is_over_unless_it_overlaps(llama_like: Build) -> None:
    workload, many = llama_like(32), 64

    def fullest(overlap: bool) -> float:
        tried = Candidate(Engine(RUNGS_BY_NAME["zero1"], (("overlap_comm", overlap),)), 1, 1, 1)
        return max(moment.gradients for moment in moments(workload, tried, many)["backward"])

    assert fullest(False) == 2.0 * workload.model.num_parameters > fullest(True)


def test_stage_0_steps_with_gradients_in_both_widths(llama_like: Build) -> None:
    workload = llama_like(4)
    (step,) = moments(workload, candidate("zero0"), 4)["step"]
    assert step.gradients == (2 + 4) * workload.model.num_parameters


def test_the_logits_are_fullest_at_the_loss(llama_like: Build) -> None:
    found = moments(llama_like(2), candidate("zero1"), 4)
    assert 0 < found["forward"][0].logits < found["loss"][0].logits


def test_stage_3_gathers_parameters_up_to_its_limit_and_no_more(llama_like: Build) -> None:
    workload = llama_like(32)
    limit = engine_knobs(workload, Engine(RUNGS_BY_NAME["zero3"]), 4)["stage3_max_live_parameters"]
    (loss,) = moments(workload, candidate("zero3"), 4)["loss"]
    assert loss.live == 2.0 * limit


def test_pinned_memory_of_offload_is_whole_powers_of_two(llama_like: Build) -> None:
    workload = llama_like(3)
    share = workload.model.num_parameters / 4
    _, pinned = offloaded(workload, candidate("zero1+opt-cpu"), 4)
    of_a_rank = pinned / 4
    assert of_a_rank == int(of_a_rank)
    blocks = (4 * share, 4 * share, 2 * share)
    assert sum(blocks) < of_a_rank < 2 * sum(blocks)
    assert bin(int(of_a_rank)).count("1") <= len(blocks)
