"""Copies of the weights in each node, and weights divided within each: where, at what price, and in which words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import TINY, bundled_workload, problem_for, tiny_trial
from helpers.searches import make_space

from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import Candidate, Engine, Problem, Technique, engines_having
from ladder.machine.machine_speed import known_speed, machine_speed
from ladder.search.belief import believe
from ladder.simulation.paper_machine import read_machine
from ladder.simulation.physics import Physics
from ladder.step.clock import StepParts
from ladder.techniques.hpz import HPZ, Hpz
from ladder.techniques.hybrid import HYBRID, Hybrid
from ladder.techniques.keys import candidate_of
from ladder.tuning.parity import as_parity_candidate, as_reference
from ladder.tuning.trial_request import engine_config
from ladder.workload.workload import Workload

LLAMA = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64)
A100 = "NVIDIA A100-SXM4-80GB"
TWO_NODES = machine_speed(A100, "cuda", 16, 256, 2)
PAPER = read_machine("a100-80").model_copy(update={"surprise": 0.0})


def two_nodes(**changes: Any) -> Problem:
    return problem_for(LLAMA, 16, num_nodes=2, **changes)


def of(key: str) -> Candidate:
    return candidate_of(key, LLAMA.global_batch_size, 16)


def parts(key: str) -> StepParts:
    candidate = of(key)
    return backend_of(candidate.engine.rung).assignment(LLAMA, candidate, 16).time_on(TWO_NODES)


def test_they_are_tried_with_several_nodes_of_several_gpus_each() -> None:
    sharded = [Engine(RUNGS_BY_NAME[name]) for name in ("zero2", "zero3", "zero3+param-cpu", "fsdp2", "ddp")]
    assert [each.name for each in engines_having(HPZ, sharded, two_nodes())] == ["zero3+hpz=8"]
    assert [each.name for each in engines_having(HYBRID, sharded, two_nodes())] == ["fsdp2+hybrid=8"]
    for ranks, nodes in ((8, 1), (2, 2), (12, 5)):
        elsewhere = problem_for(LLAMA, ranks, num_nodes=nodes)
        assert not engines_having(HPZ, sharded, elsewhere) + engines_having(HYBRID, sharded, elsewhere)


def test_only_the_first_forward_pass_of_a_step_gathers_from_other_nodes() -> None:
    one, four = (f"ckpt=off mb={size}" for size in (4, 1))
    assert parts(f"zero3 {four}").gather == parts(f"zero3 {one}").gather
    assert parts(f"zero3+hpz=8 {four}").gather < parts(f"zero3+hpz=8 {one}").gather < parts(f"zero3 {one}").gather
    whole, node = (parts(f"{name} {four}") for name in ("fsdp2", "fsdp2+hybrid=8"))
    assert node.gather < whole.gather
    assert node.update < whole.update


def test_a_link_measured_in_a_node_says_nothing_of_the_network() -> None:
    rates = {"link_bytes": 2e11}
    known = known_speed(TWO_NODES, rates, {})
    assert (known.node_link_bytes, known.link_bytes) == (2e11, TWO_NODES.link_bytes)
    assert known.belief("gather", 0.4) == TWO_NODES.belief("gather", 0.4)
    both = known_speed(TWO_NODES, {"link_bytes": 2e11, "network_bytes": 1e10}, {})
    assert (both.node_link_bytes, both.link_bytes) == (2e11, 1e10)
    on_one = machine_speed(A100, "cuda", 8, 128)
    assert known_speed(on_one, rates, {}).link_bytes == 2e11


def expected(key: str, num_nodes: int = 2, **rates: float) -> float:
    """Tokens/s that a search begins with, after `ladder doctor --measure` found `rates`."""
    space = make_space(world_size=16, num_nodes=num_nodes, num_cores=256, rates=tuple(rates.items()))
    return believe(space, ()).outlook(of(key)).speed.tokens_per_second


def test_a_search_begins_with_the_measured_network() -> None:
    usual, special = "zero3 ckpt=on mb=1", "zero3+hpz=8 ckpt=on mb=1"
    assert expected(usual, network_bytes=2e9) < expected(usual) / 2
    ahead = expected(special, network_bytes=2e9) / expected(usual, network_bytes=2e9)
    assert ahead > 1.2 * expected(special) / expected(usual)


@pytest.mark.parametrize(("rung", "technique"), [("zero3", Hpz(2)), ("fsdp2", Hybrid(2))])
def test_the_simulator_reads_the_engine_from_a_trial(tmp_path: Path, rung: str, technique: Technique) -> None:
    workload = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=8)
    spec = tiny_trial(tmp_path, 1, rung=rung, technique=technique, ranks=4)
    assert Physics(PAPER, workload, 4).engine_of(spec) == Engine(RUNGS_BY_NAME[rung]).having(technique)


def test_a_step_without_accumulation_has_a_trial_of_its_own_because_the_copies_are_new_in_it() -> None:
    once, twice, often = (of(f"zero3+hpz=8 ckpt=on mb={size}") for size in (4, 2, 1))
    assert (once.accumulation, twice.accumulation, often.accumulation) == (1, 2, 4)
    assert once.setup != twice.setup == often.setup
    assert of("zero3 ckpt=on mb=4").setup == of("zero3 ckpt=on mb=1").setup
    for candidates, accumulation in (([once], 1), ([twice], 2), ([twice, often], 3)):
        config = engine_config(LLAMA, candidates, 16, None)
        assert config["gradient_accumulation_steps"] == accumulation
        assert config["zero_optimization"]["zero_hpz_partition_size"] == 8


def test_losses_are_compared_after_equally_many_micro_steps() -> None:
    for size, accumulation in ((1, 2), (4, 2)):
        candidate = of(f"zero3+hpz=8 ckpt=on mb={size}")
        for each in (as_parity_candidate(candidate), as_reference(candidate)):
            assert engine_config(LLAMA, [each], 16, None)["gradient_accumulation_steps"] == accumulation
    alone = replace(of("zero3+hpz=8 ckpt=on mb=1"), accumulation=1)
    for each in (as_parity_candidate(alone), as_reference(alone)):
        assert engine_config(LLAMA, [each], 16, None)["gradient_accumulation_steps"] == 1
