"""What a trial is expected to cost: engines that start slowly are known to, and long steps are paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import bundled_workload, make_candidate, there
from helpers.scripts import make_script
from helpers.searches import make_space

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.search.auto import auto
from ladder.search.belief import believe
from ladder.search.cost import (
    candidate_seconds,
    expected_seconds,
    proof_seconds,
    short_step,
    start_of,
    start_seconds,
    timed_step,
)
from ladder.search.rehearsal import price

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


def test_with_adapters_an_offloaded_optimizer_starts_as_soon_as_its_few_states_are_there() -> None:
    def more(rung: str, num_trained: int) -> float:
        plain, offloaded = (start_seconds(RUNGS_BY_NAME[name], 7 * BILLION, num_trained) for name in ("zero2", rung))
        return offloaded - plain

    assert more("zero2+opt-cpu", BILLION // 100) < 3.1 < 15.0 < more("zero2+opt-cpu", 7 * BILLION)
    # Parameters on the drive are written whoever trains them.
    assert more("zero3+opt-nvme", BILLION // 100) + 3.0 < more("zero3+param-nvme+opt-nvme", BILLION // 100)


def test_long_steps_are_paid_for_at_least_three_times() -> None:
    outlook = believe(make_space("zero3"), ()).outlook(make_space("zero3").candidates[-1])
    step = short_step(outlook)
    assert step > 4.0, "its steps were to be longer than the seconds that steps are timed for"
    assert candidate_seconds(outlook) > 2.9 * step


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
def test_where_a_gpu_rests_during_the_optimizer_a_timed_step_accumulates_longer_and_in_a_proof_for_seconds(
    device: str, rung: str, batch: int, is_longer: bool
) -> None:
    workload = bundled_workload(global_batch_size=batch)
    space = make_space(rung, workload=workload, world_size=1, device=device, micro_batches=(1,), probe_layers=1)
    for outlook in (believe(space, ()).outlook(each) for each in space.candidates):
        short, probed = short_step(outlook), timed_step(replace(outlook, shallow=True))
        assert probed == pytest.approx(short_step(replace(outlook, shallow=True)))
        usual, proving = (timed_step(outlook, proving=each) for each in (False, True))
        assert (proving > usual > short) if is_longer else (proving == usual == short)
        least, most = proof_seconds(outlook)
        assert most >= least > start_of(outlook.candidate, workload) + 3 * proving


def test_every_trial_of_a_script_repeats_what_it_does_before_it_trains_and_its_proof_makes_more_steps() -> None:
    candidate = make_candidate("zero3", micro_batch=4, accumulation=4)

    def seconds(before: float | None) -> tuple[float, float]:
        script = None if before is None else make_script(preparation_seconds=before)
        space = make_space("zero3", workload=replace(bundled_workload("llama-2-7b"), script=script))
        outlook = believe(space, ()).outlook(candidate)
        return expected_seconds([outlook]), proof_seconds(outlook)[0]

    (_, of_model), (trial, proof), (slow_trial, slow_proof) = (seconds(before) for before in (None, 0.0, 40.0))
    assert proof > of_model
    assert slow_trial == pytest.approx(trial + 40)
    assert slow_proof == pytest.approx(proof + 40)


# How long a tune is said to take: a search on paper whose truth is the prior.

SMALL = make_space("zero2", "zero3", micro_batches=(1, 2))


def test_the_price_is_the_same_each_time_and_counts_trials_proof_and_comparisons() -> None:
    plain, compared = there(price(SMALL, auto)), there(price(SMALL, auto, comparisons=2))
    assert plain == price(SMALL, auto)
    assert plain.trials >= 1
    assert compared.seconds > plain.seconds + 5.0


def test_where_nothing_fits_there_is_no_price() -> None:
    assert price(replace(SMALL, memory_limit=1 << 30), auto) is None
    assert price(replace(SMALL, host_memory=1 << 20), auto) is None
