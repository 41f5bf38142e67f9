"""What the prior of speed is made of: a slower link or bus slows down the steps that use it, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import bundled_workload

from ladder.backends.deepspeed.step_terms import step_terms
from ladder.backends.plain.step_terms import plain_terms
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.machine.machine_speed import MachineSpeed, machine_speed
from ladder.search.speed import SpeedPrediction, predict_speed
from ladder.techniques.liger import LIGER
from ladder.workload.lora import Lora
from ladder.workload.matrices import tensors_of_a_block
from ladder.workload.workload import Workload

Build = Callable[..., Workload]
SHAPES = Path(__file__).parents[2] / "benchmarks/models"
MACHINE = machine_speed("NVIDIA H200", "cuda", 4, 64)
SLOW_LINK = replace(MACHINE, link_bytes=MACHINE.link_bytes / 2)
SLOW_BUS = replace(MACHINE, pcie_bytes=MACHINE.pcie_bytes / 10)


def predict(workload: Workload, rung: str, machine: MachineSpeed = MACHINE) -> SpeedPrediction:
    candidate = Candidate(Engine(RUNGS_BY_NAME[rung]), 1, 1, 4)
    return predict_speed(workload, candidate, world_size=4, machine=machine)


def test_stage_0_reduces_all_gradients_once_in_an_optimizer_step(llama_like: Build) -> None:
    workload = llama_like(8)
    fast, slow = (predict(workload, "zero0", machine) for machine in (MACHINE, SLOW_LINK))
    moved = 2 * 2.0 * workload.model.num_parameters * 3 / 4  # there and back, in 16 bits
    once = moved / SLOW_LINK.link_bytes - moved / MACHINE.link_bytes
    assert slow.accumulate_seconds == fast.accumulate_seconds
    assert slow.boundary_seconds - fast.boundary_seconds == pytest.approx(once)


def test_stage_2_reduces_in_every_micro_step(llama_like: Build) -> None:
    fast, slow = (predict(llama_like(8), "zero2", machine) for machine in (MACHINE, SLOW_LINK))
    assert slow.accumulate_seconds > fast.accumulate_seconds


@pytest.mark.parametrize(
    ("rung", "in_every_micro_step"), [("zero1+opt-cpu", False), ("zero2+opt-cpu", True), ("zero3+opt-cpu", True)]
)
def test_offloaded_gradients_cross_the_bus_in_every_micro_step_from_stage_2_on_and_once_at_stage_1(
    rung: str, in_every_micro_step: bool, llama_like: Build
) -> None:
    fast, slow = (predict(llama_like(8), rung, machine) for machine in (MACHINE, SLOW_BUS))
    assert (slow.accumulate_seconds > fast.accumulate_seconds) is in_every_micro_step
    assert slow.boundary_seconds > fast.boundary_seconds


@pytest.mark.parametrize(
    ("rung", "checkpoint_every", "fetched"),
    [
        ("zero3+param-nvme+opt-nvme", 0, 2.0),
        ("zero3+param-nvme+opt-nvme", 2, 2.5),
        ("zero3+param-nvme+opt-nvme", 1, 3.0),
        ("zero3+param-cpu", 0, 2 * (1 - 1e9 / 6_738_415_616)),
        ("zero3+param-cpu", 1, 2 * (1 - 1e9 / 6_738_415_616)),
        ("zero3+param-cpu+opt-cpu+lean", 1, 2 * (1 - 1e8 / 6_738_415_616)),
    ],
)
def test_parameters_on_nvme_are_read_in_every_pass_and_those_on_the_host_may_stay_live(
    rung: str, checkpoint_every: int, fetched: float, llama_like: Build
) -> None:
    """Seen by what a drive and a bus of twice the speed save."""
    candidate = Candidate(Engine(RUNGS_BY_NAME[rung]), checkpoint_every, 1, 4)
    twice = replace(MACHINE, pcie_bytes=2 * MACHINE.pcie_bytes, nvme_bytes=2 * MACHINE.nvme_bytes)
    slow, fast = (step_terms(llama_like(), candidate, 4, machine).gather for machine in (MACHINE, twice))
    per_rank = MACHINE.nvme_bytes / 4 if "nvme" in rung else MACHINE.pcie_bytes
    once = 2.0 * 6_738_415_616 / 4 / per_rank
    assert 2 * (slow - fast) / once == pytest.approx(fetched)


@pytest.mark.parametrize(("family", "rank", "recorded"), [("llama-3.2-1b", 8, 0.061), ("llama-3.2-1b", 256, 0.054)])
def test_a_step_of_adapters_takes_the_host_as_long_as_was_recorded_with_any_rank(
    family: str, rank: int, recorded: float
) -> None:
    """One H200, stage 0: a micro-step with the optimizer less one without, median of nine candidates."""
    workload = bundled_workload(family, seq_len=1024, global_batch_size=4, lora=Lora(rank=rank))
    candidate = Candidate(Engine(RUNGS_BY_NAME["zero0"]), 1, 1, 4)
    said = predict_speed(workload, candidate, world_size=1, machine=machine_speed("NVIDIA H200", "cuda", 1, 16))
    assert said.boundary_seconds - said.accumulate_seconds == pytest.approx(recorded, rel=0.2)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("llama-3.2-1b", 9, 9), ("opt-125m", 16, 20), ("roberta-base", 16, 20), ("t0-3b", 8, 14)],
)
def test_a_block_has_its_matrices_and_about_as_many_vectors_as_its_norms_and_biases(
    name: str, low: int, high: int
) -> None:
    assert low <= tensors_of_a_block(bundled_workload(name).model) <= high


def test_each_trained_tensor_costs_the_host_time_in_an_optimizer_step_and_at_stage_2_in_each_micro_step() -> None:
    whole, adapters = bundled_workload("opt-125m"), bundled_workload("opt-125m", lora=Lora())
    for workload in (whole, adapters):
        stage_1, stage_2 = (
            step_terms(workload, Candidate(Engine(RUNGS_BY_NAME[rung]), 0, 1, 4), 1, MACHINE)
            for rung in ("zero1", "zero2")
        )
        assert stage_2.launch > stage_1.launch
        assert stage_1.update > 0.005  # which 125 million parameters need on no GPU


@pytest.mark.parametrize(
    ("rung", "micro_batch", "seconds"),
    [  # a micro-step without the optimizer on two H100, as measured
        ("fsdp2+no-reshard", 4, 0.169),
        ("fsdp2+no-reshard", 8, 0.253),
        ("fsdp2+no-reshard", 16, 0.489),
        ("ddp", 4, 0.195),
        ("ddp", 8, 0.302),
    ],
)
def test_micro_steps_without_deepspeed_are_predicted_within_a_fifth_also_where_the_cpu_sets_the_pace(
    rung: str, micro_batch: int, seconds: float
) -> None:
    candidate = Candidate(Engine(RUNGS_BY_NAME[rung], techniques=(LIGER,)), 0, micro_batch, 4)
    machine = machine_speed("NVIDIA H100 80GB HBM3", "cuda", 2, 32)
    predicted = predict_speed(bundled_workload("llama-3.2-1b", seq_len=2048), candidate, world_size=2, machine=machine)
    assert predicted.accumulate_seconds == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("model", "seq_len", "engine", "micro_batch", "seconds"),
    [  # a micro-step without the optimizer on one H100, as measured
        ("gpt2", 1024, Engine(RUNGS_BY_NAME["zero0"]), 32, 0.180),  # an odd vocabulary, and an activation in Python
        ("pythia-410m", 2048, Engine(RUNGS_BY_NAME["zero0"]), 16, 0.247),  # rotary positions without gates
        ("pythia-410m", 2048, Engine(RUNGS_BY_NAME["ddp"]), 16, 0.291),  # norms in 32 bits
        ("gemma-2b", 2048, Engine(RUNGS_BY_NAME["zero0"], techniques=(LIGER,)), 2, 0.217),  # 64 chunks of the head
        ("mixture-of-experts-1b", 2048, Engine(RUNGS_BY_NAME["zero0"]), 16, 0.284),
    ],
    ids=["gpt2", "pythia", "pythia under autocast", "gemma", "experts"],
)
def test_micro_steps_of_other_families_are_predicted_within_a_seventh(
    model: str, seq_len: int, engine: Engine, micro_batch: int, seconds: float
) -> None:
    workload = bundled_workload(str(SHAPES / f"{model}.json"), seq_len=seq_len)
    machine = machine_speed("NVIDIA H100 80GB HBM3", "cuda", 1, 16)
    predicted = predict_speed(workload, Candidate(engine, 0, micro_batch, 4), world_size=1, machine=machine)
    assert predicted.accumulate_seconds == pytest.approx(seconds, rel=1 / 7)


@pytest.mark.parametrize(("rung", "seconds"), [("zero2", 0.106), ("zero3", 0.283), ("zero3+param-cpu", 0.289)])
def test_where_the_host_sets_the_pace_stage_3_adds_its_hooks_to_launching_kernels(rung: str, seconds: float) -> None:
    """As measured with Llama-3.2-1B on one H200 (benchmarks/results/sweeps)."""
    candidate = Candidate(Engine(RUNGS_BY_NAME[rung]), 0, 2, 8)
    machine = machine_speed("NVIDIA H200", "cuda", 1, 16)
    predicted = predict_speed(bundled_workload("llama-3.2-1b", seq_len=2048), candidate, world_size=1, machine=machine)
    assert predicted.accumulate_seconds == pytest.approx(seconds, rel=0.2)


def test_experts_under_autocast_are_computed_in_fp32() -> None:
    experts = bundled_workload(str(SHAPES / "mixture-of-experts-3b.json"))
    ddp, fsdp2 = (
        plain_terms(experts, Candidate(Engine(RUNGS_BY_NAME[rung]), 0, 1, 4), 1, MACHINE) for rung in ("ddp", "fsdp2")
    )
    assert ddp.compute > 2 * fsdp2.compute
