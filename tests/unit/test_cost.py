"""What a trial is expected to cost: engines that start slowly are known to, and long steps are paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import bundled_workload
from helpers.searches import make_space

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.search.belief import Outlook, believe
from ladder.search.cost import candidate_seconds, expected_seconds, short_step, start_seconds, timed_step

BILLION = 1_000_000_000
PROCESSES = (1.5, 3.5)
"""Seconds that processes take to start and to end, whatever they train, as measured on four H200."""


@pytest.mark.parametrize(
    ("rung", "at_least", "at_most"),
    [
        ("zero2", (0.7, 0.0), (4.2, 0.0)),
        ("zero2+opt-cpu", (3.3, 2.2), (4.9, 2.8)),
        ("zero3+param-nvme+opt-nvme", (5.3, 5.5), (6.9, 6.5)),
    ],
)
@pytest.mark.parametrize("billions", [0.7, 6.7])
def test_an_engine_starts_after_the_seconds_that_were_measured(
    rung: str, at_least: tuple[float, float], at_most: tuple[float, float], billions: float
) -> None:
    """The bounds are seconds, and seconds a billion parameters, of model and engine, as measured on four H200 less the
    1.1 to 1.7 s that engines took longer there because DeepSpeed imported more."""
    seconds = start_seconds(RUNGS_BY_NAME[rung], int(billions * BILLION))
    shortest = at_least[0] + at_least[1] * billions + PROCESSES[0]
    longest = at_most[0] + at_most[1] * billions + PROCESSES[1]
    assert shortest <= seconds <= longest


def test_more_of_the_model_off_the_gpu_starts_later() -> None:
    names = ("zero3", "zero3+param-cpu", "zero3+opt-cpu", "zero3+param-cpu+opt-cpu", "zero3+param-nvme+opt-nvme")
    seconds = [start_seconds(RUNGS_BY_NAME[name], 7 * BILLION) for name in names]
    assert seconds == sorted(set(seconds))


def test_with_adapters_an_offloaded_optimizer_starts_as_soon_as_its_few_states_are_there() -> None:
    def more(rung: str, num_trained: int) -> float:
        plain, offloaded = (start_seconds(RUNGS_BY_NAME[name], 7 * BILLION, num_trained) for name in ("zero2", rung))
        return offloaded - plain

    assert more("zero2+opt-cpu", BILLION // 100) < 3.1 < 15.0 < more("zero2+opt-cpu", 7 * BILLION)
    # Parameters on the drive are written whoever trains them.
    assert more("zero3+opt-nvme", BILLION // 100) + 3.0 < more("zero3+param-nvme+opt-nvme", BILLION // 100)


def test_a_candidate_is_paid_for_its_untimed_step_and_two_more_however_long_they_are() -> None:
    outlook = believe(make_space("zero3"), ()).outlook(make_space("zero3").candidates[-1])
    step = short_step(outlook)
    assert step > 4.0, "its steps were to be longer than the seconds that steps are timed for"
    assert candidate_seconds(outlook) == pytest.approx(3 * step)


def outlooks_on(device: str, rung: str, global_batch_size: int) -> list[Outlook]:
    workload = bundled_workload(global_batch_size=global_batch_size)
    space = make_space(rung, workload=workload, world_size=1, device=device, micro_batches=(1,), probe_layers=1)
    return [believe(space, ()).outlook(each) for each in space.candidates]


@pytest.mark.parametrize(
    ("device", "rung", "batch", "is_longer"),
    [
        ("cuda", "zero1+opt-cpu", 256, True),
        ("cuda", "zero1", 256, False),
        ("cuda", "zero1+opt-cpu", 2, False),
        ("cpu", "zero1+opt-cpu", 256, False),
    ],
    ids=["offloaded", "all on the GPU", "two micro-steps in all", "a CPU"],
)
def test_where_a_gpu_rests_during_the_optimizer_a_timed_step_accumulates_for_a_second_and_in_a_proof_for_ten(
    device: str, rung: str, batch: int, is_longer: bool
) -> None:
    for outlook in outlooks_on(device, rung, batch):
        micro = outlook.speed.accumulate_seconds
        assert micro < 0.5, "its micro-steps were to be short"
        for proving, sustained in ((False, 1.0), (True, 10.0)):
            expected = min(sustained - micro, (batch - 2) * micro) if is_longer else 0.0
            assert timed_step(outlook, proving=proving) - short_step(outlook) == pytest.approx(expected)
        probe = replace(outlook, shallow=True)
        assert timed_step(probe) == pytest.approx(short_step(probe))


def test_a_trial_costs_its_start_and_each_of_its_candidates() -> None:
    space = make_space("zero2")
    outlooks = [believe(space, ()).outlook(candidate) for candidate in space.candidates[:2]]
    one, two = expected_seconds(outlooks[:1]), expected_seconds(outlooks)
    assert two - one == pytest.approx(candidate_seconds(outlooks[1]))
    assert one > start_seconds(RUNGS_BY_NAME["zero2"], space.workload.model.num_parameters)
