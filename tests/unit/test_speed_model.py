"""The speed model against measurements, its intervals included, and model FLOP/s utilisation by hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import bundled_workload

from ladder.backends.plain.backend import PLAIN
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.machine.machine_speed import MachineSpeed, machine_speed, mfu, peak_flops
from ladder.search.speed import SpeedCalibration, SpeedObservation, SpeedPrediction, calibrate_speed, predict_speed
from ladder.step.counted import usual_block
from ladder.techniques.keys import engine_named
from ladder.techniques.liger import LIGER
from ladder.workload.lora import Lora
from ladder.workload.workload import Workload

SEVEN_BILLION = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=512)
H200 = machine_speed("NVIDIA H200", "cuda", 4, 64)
Build = Callable[..., Workload]


def candidate(rung: str, micro_batch: int = 1, checkpointing: bool = True, accumulation: int = 2) -> Candidate:
    return Candidate(Engine(RUNGS_BY_NAME[rung]), checkpointing, micro_batch, accumulation)


def predict(
    workload: Workload, tried: Candidate, known: SpeedCalibration | None = None, machine: MachineSpeed = H200
) -> SpeedPrediction:
    return predict_speed(workload, tried, world_size=4, machine=machine, calibration=known)


def learn(points: Sequence) -> SpeedCalibration:
    seen = [
        SpeedObservation(
            candidate=p.candidate, boundary_seconds=p.boundary_seconds, accumulate_seconds=p.accumulate_seconds
        )
        for p in points
    ]
    return calibrate_speed(points[0].workload, seen, world_size=4, machine=H200)


def ratio(point, known: SpeedCalibration | None = None) -> float:
    """Predicted over measured seconds of a step of two micro-steps."""
    predicted = predict(point.workload, point.candidate, known).step_seconds(2)
    return predicted / (point.accumulate_seconds + point.boundary_seconds)


@pytest.fixture
def timed(measured_points):
    return [p for p in measured_points if p.boundary_seconds is not None]


def depths(points):
    return [[p for p in points if p.num_layers == depth] for depth in sorted({p.num_layers for p in points})]


def test_without_any_measurement_step_times_are_within_a_third_except_where_the_speed_of_the_host_decides(timed):
    gathers_at_once = [p for p in timed if p.rung == "zero3" and p.candidate.micro_batch <= 2]
    assert max(abs(ratio(p) - 1) for p in gathers_at_once) < 0.6
    assert max(abs(ratio(p) - 1) for p in timed if p not in gathers_at_once) < 0.34
    assert statistics.mean(abs(ratio(p) - 1) for p in timed) < 0.125


def test_how_speed_drifts_with_the_micro_batch_is_learnt_for_other_engines_too():
    def ratio_of_zero2(known: SpeedCalibration) -> float:
        small, large = (predict(SEVEN_BILLION, candidate("zero2", size), known).step_seconds(2) for size in (8, 64))
        return large / small

    seen = []
    for size in (4, 8, 16, 32, 64):
        tried = candidate("zero3", size)
        drifting = predict(SEVEN_BILLION, tried).boundary_seconds * size**0.07
        seen.append(SpeedObservation(candidate=tried, boundary_seconds=drifting))
    known = calibrate_speed(SEVEN_BILLION, seen, world_size=4, machine=H200)
    assert ratio_of_zero2(known) / ratio_of_zero2(SpeedCalibration()) > 1.05


def test_two_micro_batches_of_each_engine_tell_all_the_others(timed):
    errors, inside = [], []
    for points in depths(timed):
        known = learn([p for p in points if p.candidate.gradient_checkpointing and p.candidate.micro_batch in (1, 4)])
        for p in points:
            if not (p.candidate.gradient_checkpointing and p.candidate.micro_batch in (1, 4)):
                prediction = predict(p.workload, p.candidate, known)
                errors.append(abs(ratio(p, known) - 1))
                inside.append(prediction.low < 1 / ratio(p, known) < prediction.high)
    assert statistics.mean(errors) < 0.03
    assert max(errors) < 0.10
    assert statistics.mean(inside) > 0.9


def test_intervals_hold_after_measurements_on_one_engine_only(timed):
    for points in depths(timed):
        known = learn([p for p in points if p.rung == "zero3" and p.candidate.micro_batch == 4])
        for p in points:
            prediction = predict(p.workload, p.candidate, known)
            assert prediction.low < 1 / ratio(p, known) < prediction.high


def test_intervals_narrow_from_unknown_to_another_engine_to_one_and_two_measurements(timed):
    points = [p for p in timed if p.num_layers == 32 and p.rung == "zero2+opt-cpu"]
    others = [p for p in timed if p.num_layers == 32 and p.rung == "zero3"]
    last = points[3]
    known = [None, learn(others), learn([*others, points[0]]), learn([*others, points[0], points[2]])]
    widths = [predict(last.workload, last.candidate, k).high for k in known]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 1.5
    assert widths[1] > 1.3
    assert widths[2] < 1.3
    assert widths[3] < 1.06


def test_a_machine_three_times_as_slow_is_learnt_from_one_measurement(timed):
    point = next(p for p in timed if p.num_layers == 4 and p.rung == "zero2" and p.candidate.micro_batch == 4)
    slow = replace(point, accumulate_seconds=3 * point.accumulate_seconds, boundary_seconds=3 * point.boundary_seconds)
    known = learn([slow])
    assert predict(point.workload, point.candidate, known).boundary_seconds == pytest.approx(
        slow.boundary_seconds, rel=0.05
    )
    other = candidate("zero3", 4)
    assert (
        predict(point.workload, other, known).boundary_seconds > 1.7 * predict(point.workload, other).boundary_seconds
    )


def test_utilisation_counts_all_gpus_and_is_unknown_for_an_unknown_one(llama_like: Build):
    one, four = (mfu(llama_like(), 10_000.0, ranks, "NVIDIA H200") for ranks in (1, 4))
    assert one is not None
    assert four == pytest.approx(one / 4)
    assert mfu(llama_like(), 10_000.0, 4, "Imaginary GPU 9") is None


def test_a_gpu_is_not_taken_for_another_whose_name_is_a_part_of_its_own():
    faster_first = [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"),
        ("NVIDIA A10", "NVIDIA A10G"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A10"),
        ("NVIDIA L40S", "NVIDIA L4"),
    ]
    for fast, slow in faster_first:
        assert (peak_flops(fast) or 0) > (peak_flops(slow) or 0) > 0, slow
    assert peak_flops("NVIDIA GH200 480GB") == peak_flops("NVIDIA H100 80GB HBM3")


def test_a_machine_unlike_its_data_sheet_is_doubted_in_everything(timed):
    usual = [p for p in timed if p.num_layers == 32 and p.rung == "zero2+opt-cpu"]
    strange = [
        replace(p, accumulate_seconds=30 * p.accumulate_seconds, boundary_seconds=30 * p.boundary_seconds)
        for p in usual
    ]
    other = next(p for p in timed if p.num_layers == 32 and p.rung == "zero3")
    trusted, doubted = (predict(other.workload, other.candidate, learn(points)) for points in (usual, strange))
    assert doubted.high / doubted.low > 1.5 * trusted.high / trusted.low


# What the prior of speed is made of: a slower link or bus slows down the steps that use it, and no others.

SHAPES = Path(__file__).parents[2] / "benchmarks/models"
SLOW_LINK = replace(H200, link_bytes=H200.link_bytes / 2)


@pytest.mark.parametrize(("rung", "in_every_micro_step"), [("zero0", False), ("zero2", True)])
def test_stage_0_reduces_all_gradients_once_in_an_optimizer_step_and_stage_2_in_every_micro_step(
    rung: str, in_every_micro_step: bool, llama_like: Build
) -> None:
    fast, slow = (predict(llama_like(8), candidate(rung), machine=machine) for machine in (H200, SLOW_LINK))
    assert (slow.accumulate_seconds > fast.accumulate_seconds) is in_every_micro_step
    assert slow.boundary_seconds > fast.boundary_seconds


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


def test_experts_under_autocast_are_computed_in_fp32() -> None:
    experts = bundled_workload(str(SHAPES / "mixture-of-experts-3b.json"))
    ddp, fsdp2 = (
        PLAIN.assignment(experts, Candidate(Engine(RUNGS_BY_NAME[rung]), 0, 1, 4), 1).time_on(H200)
        for rung in ("ddp", "fsdp2")
    )
    assert ddp.compute > 2 * fsdp2.compute


@pytest.mark.parametrize(("name", "slow"), [("gemma-3-1b", {"masked": 0.0}), ("deepseek-v2-lite", {"flops_32": 0.0})])
def test_attention_with_a_mask_and_products_in_32_bits_take_longer(name: str, slow: dict[str, float]) -> None:
    usual = bundled_workload(name, seq_len=2048)
    quick = replace(usual, model=replace(usual.model, block=replace(usual_block(usual.model), **slow)))
    longer, shorter = (PLAIN.assignment(each, candidate("fsdp2"), 1).time_on(H200).compute for each in (usual, quick))
    assert longer > 1.005 * shorter


def test_fp8_is_predicted_to_be_faster_only_where_it_is_compiled() -> None:
    def compute(name: str) -> float:
        tried = Candidate(engine_named(name), 0, 8, 1)
        return PLAIN.assignment(SEVEN_BILLION, tried, 2).time_on(H200).compute

    assert compute("ddp+compile+fp8") < compute("ddp") < compute("ddp+fp8")
