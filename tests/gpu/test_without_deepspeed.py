"""Rungs without DeepSpeed on real GPUs: they train as DeepSpeed's do, take the memory that is predicted, and save."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import FOUR_LAYERS_CONFIG, TINY, Bench, tiny_trial

from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.events.protocol import FailedEvent, MeasuredEvent, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.machine.gpus import visible_gpus
from ladder.search.memory import expected_peak
from ladder.techniques.keys import engine_named
from ladder.tuning.parity import losses_of, parity_trial
from ladder.tuning.trial_request import candidate_spec, environment_of, rank_modules_of
from ladder.units import GIB
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(visible_gpus()) < 2, reason="needs two CUDA GPUs")]
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")

RUNGS = [rung.name for rung in PLAIN_RUNGS]
FSDP2 = [name for name in RUNGS if name != "ddp"]


@pytest.fixture(scope="module")
def bench(bench_on: Callable[..., Any]) -> Iterator[Bench]:
    with bench_on(2, FOUR_LAYERS_CONFIG) as bench:
        yield bench


def on_gpus(spec: TrialSpec) -> TrialSpec:
    """`spec`, of two CPU ranks, on two GPUs."""
    uuids = tuple(gpu.uuid for gpu in visible_gpus()[:2])
    return replace(spec, device="cuda", gpu_uuids=uuids, memory_limit=16 * GIB)


def trial(folder: Path, name: str, workload: Workload, **changes: Any) -> tuple[TrialSpec, Candidate]:
    """A trial of the engine `name` with micro-batch 1, and its candidate."""
    engine = engine_named(name)
    candidate = Candidate(engine, False, 1, workload.global_batch_size // 2)
    config = backend_of(engine.rung).configuration(
        workload, engine, micro_batch=1, accumulation=candidate.accumulation, world_size=2, nvme_path=None
    )
    told: dict[str, Any] = {
        "model_config_json": dict(workload.model.config),
        "seq_len": workload.seq_len,
        "deepspeed": config,
        "candidates": (candidate_spec(candidate),),
        "rank_modules": rank_modules_of(engine),
        "environment": environment_of(engine, 2),
    }
    usual = tiny_trial(folder, 1, rung=engine.rung.name)
    return on_gpus(replace(usual, **(told | changes))), candidate


def measured(bench: Bench, spec: TrialSpec) -> MeasuredEvent:
    run = bench.run(spec)
    failed = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    assert not failed, failed[0].traceback
    return next(event for event in run.events[0] if isinstance(event, MeasuredEvent))


@pytest.fixture(scope="module")
def of_zero1(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    spec = on_gpus(tiny_trial(tmp_path_factory.mktemp("zero1"), 1, rung="zero1"))
    return losses_of(bench.run(parity_trial(spec, TINY)))


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_without_deepspeed_trains_on_gpus_as_stage_1_does(
    bench: Bench, tmp_path: Path, of_zero1: list[float], rung: str
) -> None:
    own = measured(bench, parity_trial(on_gpus(tiny_trial(tmp_path / "0001", 1, rung=rung)), TINY)).losses
    assert own[-1] < 0.96 * own[0]
    assert own == pytest.approx(of_zero1, rel=0.01)


def test_what_a_rung_holds_falls_with_what_it_divides_and_is_what_was_predicted(bench: Bench, tmp_path: Path) -> None:
    model = shape_from_config(FOUR_LAYERS_CONFIG, name="four layers", source="file")
    workload = Workload(model=model, task="causal-lm", seq_len=512, global_batch_size=4)
    held, errors = {}, {}
    for rung in RUNGS:
        spec, candidate = trial(tmp_path / rung, rung, workload, steps=StepPolicy(maximum=3, seconds=1.0))
        peak = measured(bench, spec).peak_device
        predicted = expected_peak(workload, candidate, world_size=2, device="cuda")
        held[rung], errors[rung] = peak, predicted / peak - 1
    print(held, errors)
    assert held["ddp"] > held["fsdp2+no-reshard"] >= held["fsdp2"] > held["fsdp2+cpu"]
    assert all(abs(error) < 0.15 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("fsdp2+compile", 0.01),
        pytest.param("ddp+fp8", 0.02, marks=needs_torchao),
        pytest.param("fsdp2+fp8", 0.02, marks=needs_torchao),
        pytest.param("fsdp2+compile+fp8", 0.02, marks=needs_torchao),
    ],
)
def test_compiled_blocks_and_fp8_train_on_two_gpus_nearly_as_stage_1_does(
    bench: Bench, tmp_path: Path, of_zero1: list[float], name: str, within: float
) -> None:
    spec, _ = trial(tmp_path / "0001", name, Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=4))
    own = measured(bench, parity_trial(spec, TINY))
    if "+compile" in name:
        assert own.compile_seconds is not None
    number = min(len(own.losses), len(of_zero1))
    assert own.losses[:number] == pytest.approx(of_zero1[:number], rel=within)
