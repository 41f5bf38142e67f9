"""How long a trial waits for its ranks and for a drive: the larger the model, the longer."""

from __future__ import annotations

import pytest
from helpers import bundled_workload

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.machine.nvme import needed_bytes, step_patience
from ladder.tuning.trial_request import trial_deadlines

SMALL, SEVEN_BILLION = bundled_workload("tiny-llama"), bundled_workload("llama-2-7b")
ON_HOST, ON_DISK = (Engine(RUNGS_BY_NAME[name]) for name in ("zero3+opt-cpu", "zero3+param-nvme+opt-nvme"))
SLOW_DRIVE = 5e8
"""Bytes a second."""


@pytest.mark.parametrize("phase", ["model", "engine", "first_step"])
def test_a_large_model_has_minutes_more_to_be_laid_out(phase: str) -> None:
    small, large = (getattr(trial_deadlines(workload, ON_HOST), phase) for workload in (SMALL, SEVEN_BILLION))
    assert large - small > 60


@pytest.mark.parametrize("phase", ["model", "engine", "first_step", "step", "total"])
def test_a_drive_is_waited_for_longer_than_the_host(phase: str) -> None:
    on_host, on_disk = (getattr(trial_deadlines(SEVEN_BILLION, engine), phase) for engine in (ON_HOST, ON_DISK))
    assert on_disk > on_host


@pytest.mark.parametrize("model", ["tiny-llama", "llama-2-7b", "llama-2-13b"])
def test_a_slow_drive_is_waited_for_while_it_moves_all_states_of_a_step(model: str) -> None:
    workload = bundled_workload(model)
    states, master, gradients = 2 * 8, 2 * 4, 6  # bytes a parameter: states and master are read and written
    moved = (states + master + gradients) * workload.model.num_parameters
    assert step_patience(workload) > moved / SLOW_DRIVE


def test_sgd_keeps_the_master_weights_on_the_drive_and_no_moments() -> None:
    rung = RUNGS_BY_NAME["zero3+opt-nvme"]
    sgd, adam = (needed_bytes(rung, bundled_workload("llama-2-7b", optimizer=name)) for name in ("sgd", "adam"))
    assert sgd == 4 * SEVEN_BILLION.model.num_parameters
    assert adam == 3 * sgd
