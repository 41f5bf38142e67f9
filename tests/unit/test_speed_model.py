"""The speed model against measurements, its intervals included, and model FLOP/s utilisation by hand."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from helpers import bundled_workload

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.machine.machine_speed import flops_per_token, machine_speed, mfu, peak_flops
from ladder.search.speed import SpeedCalibration, SpeedObservation, SpeedPrediction, calibrate_speed, predict_speed
from ladder.workload.workload import Workload

SEVEN_BILLION = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=512)
H200 = machine_speed("NVIDIA H200", "cuda", 4, 64)
Build = Callable[..., Workload]


def candidate(rung: str, micro_batch: int = 1, checkpointing: bool = True, accumulation: int = 2) -> Candidate:
    return Candidate(Engine(RUNGS_BY_NAME[rung]), checkpointing, micro_batch, accumulation)


def predict(workload: Workload, tried: Candidate, known: SpeedCalibration | None = None) -> SpeedPrediction:
    return predict_speed(workload, tried, world_size=4, machine=H200, calibration=known)


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
    assert statistics.mean(abs(ratio(p) - 1) for p in timed) < 0.12


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


def test_an_interval_is_multiplicative_and_symmetric(llama_like: Build):
    prediction = predict(llama_like(), candidate("zero3"))
    assert prediction.low * prediction.high == pytest.approx(1)


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


def test_boundary_steps_alone_are_enough_to_learn_from(timed):
    points = [p for p in timed if p.num_layers == 32 and p.rung == "zero3"]
    seen = [SpeedObservation(candidate=p.candidate, boundary_seconds=p.boundary_seconds) for p in points]
    known = calibrate_speed(points[0].workload, seen, world_size=4, machine=H200)
    for p in points:
        assert predict(p.workload, p.candidate, known).boundary_seconds == pytest.approx(p.boundary_seconds, rel=0.06)


def test_steps_take_longer_with_a_larger_micro_batch_but_tokens_go_faster(llama_like: Build):
    for rung in RUNGS:
        predictions = [predict(llama_like(), candidate(rung.name, mb, accumulation=16 // mb)) for mb in (1, 2, 4, 8)]
        assert all(p.accumulate_seconds < q.accumulate_seconds for p, q in itertools.pairwise(predictions))
        assert all(p.tokens_per_second < q.tokens_per_second for p, q in itertools.pairwise(predictions))


def test_checkpointing_costs_a_third_of_the_compute(llama_like: Build):
    times = [
        predict(llama_like(), candidate("zero1", 16, checkpointing)).accumulate_seconds
        for checkpointing in (True, False)
    ]
    assert times[0] / times[1] == pytest.approx(4 / 3, rel=0.01)


def test_accumulation_repeats_the_accumulating_step_only(llama_like: Build):
    prediction = predict(llama_like(), candidate("zero2+opt-cpu", 4, accumulation=4))
    expected = 3 * prediction.accumulate_seconds + prediction.boundary_seconds
    assert prediction.step_seconds(4) == pytest.approx(expected)
    assert prediction.step_seconds(1) == prediction.boundary_seconds
    assert prediction.tokens_per_second == pytest.approx(4 * 4 * 4 * 2048 / expected)


def test_a_cpu_optimizer_dominates_the_boundary_and_a_disk_more_so(llama_like: Build):
    extras = []
    for rung in ("zero3", "zero3+opt-cpu", "zero3+opt-nvme"):
        prediction = predict(llama_like(), candidate(rung))
        extras.append(prediction.boundary_seconds - prediction.accumulate_seconds)
    assert extras[1] > 10 * extras[0]
    assert extras[2] > 5 * extras[1]


def test_a_single_gpu_spends_nothing_on_communication(llama_like: Build):
    alone = predict_speed(llama_like(), candidate("zero2", 8), world_size=1, machine=H200)
    assert alone.accumulate_seconds < predict(llama_like(), candidate("zero2", 8)).accumulate_seconds


def test_the_flops_of_a_token_are_six_for_each_weight_and_the_attention(llama_like: Build):
    workload = llama_like()
    matmuls = 6_738_415_616 - 32000 * 4096 - 65 * 4096
    assert flops_per_token(workload) == 6 * matmuls + 6 * 32 * 4096 * 2048


def test_utilisation_counts_all_gpus_and_is_unknown_for_an_unknown_one(llama_like: Build):
    workload = llama_like()
    tokens_per_second = 4 * 989e12 * 0.5 / flops_per_token(workload)
    assert mfu(workload, tokens_per_second, 4, "NVIDIA H200") == pytest.approx(0.5)
    assert mfu(workload, tokens_per_second, 4, "Imaginary GPU 9") is None
    assert mfu(workload, tokens_per_second, 4, None) is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_gpus_are_known_by_the_names_that_the_driver_gives(name: str, tera: int):
    assert peak_flops(name) == tera * 1e12


def test_an_unknown_gpu_and_a_cpu_have_a_prior_too(llama_like: Build):
    for machine in (machine_speed(None, "cuda", 2, 8), machine_speed(None, "cpu", 2, 2)):
        prediction = predict_speed(llama_like(), candidate("zero2"), world_size=2, machine=machine)
        assert math.isfinite(prediction.tokens_per_second)
        assert prediction.tokens_per_second > 0


def test_a_machine_unlike_its_data_sheet_is_doubted_in_everything(timed):
    usual = [p for p in timed if p.num_layers == 32 and p.rung == "zero2+opt-cpu"]
    strange = [
        replace(p, accumulate_seconds=30 * p.accumulate_seconds, boundary_seconds=30 * p.boundary_seconds)
        for p in usual
    ]
    other = next(p for p in timed if p.num_layers == 32 and p.rung == "zero3")
    trusted, doubted = (predict(other.workload, other.candidate, learn(points)) for points in (usual, strange))
    assert doubted.high / doubted.low > 1.5 * trusted.high / trusted.low
