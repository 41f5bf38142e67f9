"""Probes: a few layers tell how fast an engine is, cost little, and decide nothing by themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers import bundled_workload, make_measurement, make_record
from helpers.searches import decide, make_space

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.events.outcome import Outcome, OutcomeKind, Record
from ladder.machine.machine_speed import machine_speed
from ladder.search.belief import believe
from ladder.search.cost import expected_seconds
from ladder.search.ledger import ledger
from ladder.search.probes import probe_first
from ladder.search.space import Space, ruled_out
from ladder.search.speed import SpeedObservation, calibrate_speed, predict_speed
from ladder.search.why import why_not
from ladder.units import GIB

SEVEN_BILLION = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=128)
FEW_SEQUENCES = bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=32)
"""With which the optimizer's step on the host weighs more, so that its engines may well lose."""


def space_of(**changes: object) -> Space:
    """Llama-2-7B on four GH200 that are held to 40 GiB, without NVMe, whose engines are doubted more than an H200's."""
    settings: dict[str, Any] = {
        "workload": SEVEN_BILLION,
        "memory_limit": 40 * GIB,
        "host_memory": 480 * GIB,
        "micro_batches": (1, 2, 4, 8, 16, 32),
        "gpu_name": "NVIDIA GH200",
        "num_cores": 41,
        "probe_layers": 4,
    }
    rungs = (rung.name for rung in RUNGS if rung.documented and "nvme" not in rung.devices)
    return make_space(*rungs, **settings | changes)


def candidate(space: Space, rung: str, micro_batch: int, checkpointing: bool = True) -> Candidate:
    accumulation = space.sequences_per_rank // micro_batch
    return Candidate(Engine(RUNGS_BY_NAME[rung]), checkpointing, micro_batch, accumulation)


def probe_record(space: Space, tried: Candidate, *, slower: float = 1.0, trial: str = "0002") -> Record:
    """A probe of `tried` that took as long as expected, or `slower`."""
    machine = machine_speed(space.gpu_name, "cuda", space.world_size, space.num_cores)
    speed = predict_speed(space.shallow, tried, world_size=space.world_size, machine=machine)
    seen = make_measurement(
        accumulate_seconds=speed.accumulate_seconds * slower, boundary_seconds=speed.boundary_seconds * slower
    )
    return make_record(tried, purpose="probe", trial=trial, measurement=seen, tokens_per_second=None)


def measured_zero3(space: Space) -> Record:
    """A tenth faster than it was measured on four H200, so that others may well lose."""
    tried = candidate(space, "zero3", 4)
    seen = make_measurement(
        accumulate_seconds=0.95, boundary_seconds=1.01, peak_device=39 * GIB, peak_reserved=37 * GIB
    )
    return make_record(tried, trial="0001", measurement=seen, tokens_per_second=33_400.0)


def test_an_engine_that_is_dear_to_try_and_may_lose_is_probed_first():
    space = space_of(workload=FEW_SEQUENCES)
    decision = decide(space, [measured_zero3(space)])
    assert decision.probe
    assert "cpu" in decision.engine.rung.devices
    assert decision.reason.startswith("4 layers before a trial of ")
    without = replace(space, probe_layers=0)
    assert not decide(without, [measured_zero3(without)]).probe


def test_an_engine_whose_probe_was_fast_is_tried_whole_and_one_whose_probe_was_slow_is_not():
    space = space_of(workload=FEW_SEQUENCES)
    asked = decide(space, [measured_zero3(space)])
    assert asked.probe
    fast = [probe_record(space, each, slower=0.7) for each in asked.candidates]
    later = decide(space, [measured_zero3(space), *fast])
    assert later.engine == asked.engine
    assert not later.probe
    slow = [probe_record(space, each, slower=2.0) for each in asked.candidates]
    assert decide(space, [measured_zero3(space), *slow]).engine != asked.engine


@pytest.mark.parametrize("rung", ["zero2+opt-cpu", "zero3+opt-cpu", "zero3+param-cpu+opt-cpu"])
@pytest.mark.parametrize("micro_batch", [4, 8])
def test_from_four_layers_the_steps_of_thirty_two_are_as_measured_within_what_is_doubted(
    measured_points, rung: str, micro_batch: int
):
    """Measured: Llama-2-7B and its first four layers, four H200."""
    machine = machine_speed("NVIDIA H200", "cuda", 4, 64)
    own = {
        p.num_layers: p
        for p in measured_points
        if p.rung == rung and p.candidate.micro_batch == micro_batch and p.candidate.gradient_checkpointing
    }
    seen = SpeedObservation(
        candidate=own[4].candidate,
        shallow=own[4].workload,
        boundary_seconds=own[4].boundary_seconds,
        accumulate_seconds=own[4].accumulate_seconds,
    )
    for accumulation, most in ((1, 0.25), (16, 0.12)):
        whole = replace(own[32].candidate, accumulation=accumulation)
        known = calibrate_speed(own[32].workload, [seen], world_size=4, machine=machine)
        told = predict_speed(own[32].workload, whole, world_size=4, machine=machine, calibration=known)
        true = (accumulation - 1) * own[32].accumulate_seconds + own[32].boundary_seconds
        error = math.log(told.step_seconds(accumulation) / true)
        assert abs(error) < most
        assert abs(error) < 2 * known.fit.deviation(told.estimate)


def test_a_probe_that_failed_rules_nothing_out():
    space = space_of()
    tried = candidate(space, "zero3+opt-cpu", 4)
    ways: list[tuple[OutcomeKind, str]] = [("crash", "engine"), ("gpu_oom", "forward")]
    for kind, moment in ways:
        failed = [
            make_record(tried, kind, purpose="probe", trial=trial, outcome=Outcome(kind=kind, moment=moment))
            for trial in ("0001", "0002")
        ]
        for other in space.of_engine(tried.engine):
            assert ruled_out(other, space, failed) is None


def test_the_ledger_and_why_name_the_probe_that_spoke_against_an_engine():
    space = space_of()
    tried = candidate(space, "zero3+opt-cpu", 16)
    records = [measured_zero3(space), probe_record(space, tried, slower=2.0, trial="0007")]
    entries = ledger(space, records, {})
    own = next(entry for entry in entries if entry.candidate_key == tried.key)
    assert own.status == "predicted"
    assert "after its engine's probe (trial 0007)" in own.why
    assert "only probed, with a few of the model's layers (trial 0007)" in why_not("zero3+opt-cpu", entries, space)


def test_an_engine_whose_trial_takes_no_longer_than_a_probe_is_not_probed():
    space = space_of()
    belief = believe(space, [measured_zero3(space)])
    dear = [belief.outlook(candidate(space, "zero3+opt-cpu", 16))]
    shallow = [belief.outlook(each.candidate, shallow=True) for each in dear]
    seconds, target = expected_seconds(shallow), 30_700.0
    assert probe_first(belief, (), dear, 100 * seconds, 100 * target), "a long and hopeless trial was to be probed"
    assert not probe_first(belief, (), dear, seconds, 100 * target)
