"""How long proofs are expected to take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import bundled_workload, make_candidate
from helpers.scripts import make_script
from helpers.searches import make_space

from ladder.search.belief import believe
from ladder.search.cost import expected_seconds, proof_seconds, short_step, start_of, timed_step


def test_the_proof_of_a_script_makes_whole_optimizer_steps_and_more_of_them() -> None:
    space = make_space("zero3", workload=replace(bundled_workload("llama-2-7b"), script=make_script()))
    outlook = believe(space, ()).outlook(make_candidate("zero3", micro_batch=4, accumulation=4))
    least, most = proof_seconds(outlook)
    assert least == pytest.approx(start_of(outlook.candidate, space.workload) + 11 * outlook.speed.step_seconds(4))
    assert most >= least


def test_a_proof_whose_optimizer_is_on_the_host_makes_longer_steps_than_a_trial() -> None:
    workload = bundled_workload(global_batch_size=256)
    space = make_space("zero1+opt-cpu", workload=workload, world_size=1, micro_batches=(1,))
    outlook = believe(space, ()).outlook(space.candidates[0])
    step = timed_step(outlook, proving=True)
    least, most = proof_seconds(outlook)
    assert step > 2 * timed_step(outlook), "its accumulation was to take longer than a trial's"
    assert least == pytest.approx(start_of(outlook.candidate, workload) + 3 * short_step(outlook) + 3 * step)
    assert most >= least


def test_every_trial_of_a_script_repeats_what_it_does_before_it_trains() -> None:
    candidate = make_candidate("zero3", micro_batch=4, accumulation=4)

    def seconds(before: float) -> tuple[float, float]:
        script = make_script(preparation_seconds=before)
        space = make_space("zero3", workload=replace(bundled_workload("llama-2-7b"), script=script))
        outlook = believe(space, ()).outlook(candidate)
        return expected_seconds([outlook]), proof_seconds(outlook)[0]

    (trial, proof), (slow_trial, slow_proof) = seconds(0.0), seconds(40.0)
    assert slow_trial == pytest.approx(trial + 40)
    assert slow_proof == pytest.approx(proof + 40)
