"""A tune with a time budget, on the clock of a machine on paper: search and proof end within it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload, there
from helpers.tunes import tune_over

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.events.protocol import TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines, Listener
from ladder.search.policy import STRATEGIES
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import read_machine
from ladder.tuning.tuner import TuneResult

_OVER = 1.1
"""Chosen: the margin that the search keeps for errors of its predictions."""


class FailsTheFirstProof(SimulatedLauncher):
    """On this machine nothing fits in the first proof, which ends a minute later."""

    proofs = 0

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        self.proofs += spec.proof
        if spec.proof and self.proofs == 1:
            spec = replace(spec, memory_limit=1 << 30)
            self._clock += 60.0
        return super().run(spec, deadlines, listener)


def tuned(
    folder: Path,
    budget: float | None,
    *,
    launcher: type[SimulatedLauncher] = SimulatedLauncher,
    **options: Any,
) -> TuneResult:
    """A tune on four GPUs."""
    simulated = read_machine("a100-40")
    trials = launcher(simulated)
    return tune_over(
        trials,
        folder,
        bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=128),
        strategy=STRATEGIES["auto"],
        machine=simulated.machine(4, gpu_memory=40 << 30),
        rungs=[rung for rung in RUNGS if "nvme" not in rung.devices],
        micro_batches=(1, 2, 4, 8, 16),
        clock=trials.now,
        time_budget=budget,
        **options,
    )


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """With all the time that it wants."""
    return tuned(tmp_path_factory.mktemp("free"), None)


def test_search_and_proof_end_within_the_budget_and_more_time_is_used(free: TuneResult, tmp_path: Path) -> None:
    shortest = tuned(tmp_path / "least", 1.0)
    budgets = [shortest.seconds + share * (free.seconds - shortest.seconds) for share in (0.25, 0.6)]
    speeds = []
    for number, budget in enumerate(budgets):
        result = tuned(tmp_path / str(number), budget)
        assert result.seconds <= _OVER * budget
        assert result.out_of_time
        assert "no time is left to try" in result.stopped
        speeds.append(there(result.answer).tokens_per_second or 0.0)
    assert "over the budget, which is too short for a trial and its proof" in shortest.stopped
    assert speeds[0] >= 0.98 * (there(shortest.answer).tokens_per_second or 0.0)
    assert speeds[1] >= 0.98 * speeds[0]


def test_a_proof_that_fails_at_the_end_is_followed_by_the_next_ones_and_the_overrun_is_said(
    free: TuneResult, tmp_path: Path
) -> None:
    result = tuned(tmp_path, 0.7 * free.seconds, launcher=FailsTheFirstProof)
    failed = [each.candidate_key for each in result.records if each.purpose == "proof" and each.outcome.kind != "fits"]
    assert len(failed) == 1
    assert there(result.answer).candidate_key not in failed
    assert result.seconds > 0.7 * free.seconds
    assert f"over the budget, as the proof of {failed[0]} failed" in result.stopped


def test_settings_of_knobs_are_tried_only_while_there_is_time_to_prove_the_best(
    free: TuneResult, tmp_path: Path
) -> None:
    budget = 1.8 * free.seconds
    result = tuned(tmp_path, budget, knob_trials=12)
    turned = {record.trial for record in result.records if "[" in record.candidate_key and record.purpose == "measure"}
    assert 0 < len(turned) < 12
    assert result.seconds <= _OVER * budget
