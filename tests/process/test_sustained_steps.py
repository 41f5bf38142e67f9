"""Timed steps that accumulate longer than the trial's configuration says: real engines on CPU ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Bench, tiny_trial

from ladder.events.protocol import MeasuredEvent
from ladder.events.step_policy import StepPolicy
from ladder.launch.operator_builds import build_operators

FEWEST, ACCUMULATION = 2, 6
MICRO_STEPS = [FEWEST, FEWEST, ACCUMULATION, ACCUMULATION]
"""Of two untimed steps and two timed ones."""
STEPS = StepPolicy(warmup=1, minimum=2, maximum=2, sustained_seconds=60.0)


@pytest.mark.parametrize("rung", ["zero1", "zero2", "zero3", "ddp", "fsdp2"])
def test_the_optimizer_steps_once_in_a_step_that_accumulates_longer(
    warm_bench: Bench, tmp_path: Path, rung: str
) -> None:
    assert_each_step_is_one(measured(warm_bench, tmp_path, rung))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("rung", ["zero2+opt-cpu", "zero3+param-cpu+opt-cpu"])
def test_an_optimizer_on_the_host_steps_once_in_a_step_that_accumulates_longer(
    warm_bench: Bench, trial_environment: dict[str, str], tmp_path: Path, rung: str
) -> None:
    assert build_operators(["cpu_adam"], trial_environment) == {"cpu_adam": None}  # two ranks at once might fail
    assert_each_step_is_one(measured(warm_bench, tmp_path, rung))


def measured(bench: Bench, folder: Path, rung: str) -> MeasuredEvent:
    spec = tiny_trial(folder / "0001", 1, rung=rung, accumulation=FEWEST, steps=STEPS)
    candidates = tuple(replace(each, accumulation=ACCUMULATION) for each in spec.candidates)
    # In each step, the same data come in the same order, so losses of one place differ by what was trained meanwhile.
    run = bench.run(replace(spec, candidates=candidates, parity=True))
    (event,) = [each for each in run.events[0] if isinstance(each, MeasuredEvent)]
    return event


def assert_each_step_is_one(event: MeasuredEvent) -> None:
    assert event.micro_steps == ACCUMULATION
    assert len(event.losses) == sum(MICRO_STEPS)
    ends = itertools.accumulate(MICRO_STEPS)
    begins = [event.losses[end - length] for end, length in zip(ends, MICRO_STEPS, strict=True)]
    falls = [before - after for before, after in itertools.pairwise(begins)]
    # Three steps of the optimizer in a long one would let the loss fall three times as much.
    assert min(falls) > 0.05
    assert max(falls) < 1.6 * min(falls)
