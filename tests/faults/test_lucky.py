"""What was measured once is not believed: finalists run again, noise does not decide, and a narrow fit is said so."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faults.provocation import FaultyBench, records_of
from helpers import TINY, tiny_trial
from helpers.tunes import tune_over

from ladder.events.protocol import Event, MeasuredEvent, PhaseEvent, StepEvent, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.search.policy import exhaustive, walk
from ladder.units import GIB
from ladder.workload.workload import Workload

WORKLOAD = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=4)
QUICK = StepPolicy(maximum=3, seconds=0.2)


@dataclass
class UnluckyProofs(Launcher):
    """Real trials; rank 1 of the first proof gets no more memory as it warms up."""

    bench: FaultyBench
    victims: list[str] = field(default_factory=list)

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        def listen(rank: int, event: Event) -> None:
            listener(rank, event)
            warms_up = isinstance(event, PhaseEvent) and event.phase == "warmup"
            if spec.proof and rank == 1 and warms_up and not self.victims:
                self.victims.append(spec.candidates[0].key)
                # Of a limit set from here not every library speaks: one may end the process with a SIGSEGV.
                self.bench.provoke(self.bench.rank(1), "ask_for_a_pebibyte")

        return self.bench.launcher.run(spec, deadlines, listen)

    def close(self) -> None:
        """The bench is not ours."""


@pytest.mark.parametrize("strategy", [exhaustive, walk])
def test_a_candidate_that_fits_once_and_then_not_makes_way_for_one_that_fits_twice(
    bench: FaultyBench, tmp_path: Path, strategy: Any
) -> None:
    launcher = UnluckyProofs(bench)
    result = tune_over(launcher, tmp_path / "run", WORKLOAD, strategy=strategy, micro_batches=(1,), steps=QUICK)
    (lucky,) = launcher.victims
    of_lucky = [(record.purpose, record.outcome.kind) for record in result.records if record.candidate_key == lucky]
    assert of_lucky == [("measure", "fits"), ("proof", "gpu_oom")]
    assert result.answer is not None
    assert result.answer.candidate_key != lucky
    assert (result.answer.purpose, result.answer.outcome.kind) == ("proof", "fits")
    assert result.best_so_far is not None
    assert result.best_so_far.candidate_key != lucky


DISTURBED_SECONDS = 0.5


def test_outliers_among_the_steps_do_not_move_the_measurement(bench: FaultyBench, tmp_path: Path) -> None:
    timed: list[Event] = []

    def disturb(rank: int, event: Event) -> None:
        """Stop rank 1 now and then; once in a while that falls between two steps, where no time is taken."""
        measuring = any(
            isinstance(seen, PhaseEvent) and seen.phase == "measure" for at, seen in bench.events if at == 1
        )
        if rank == 1 and measuring and isinstance(event, StepEvent):
            timed.append(event)
            if len(timed) in (5, 20, 35):
                bench.rank(1).suspend()
                time.sleep(DISTURBED_SECONDS)
                bench.rank(1).resume()

    steps = StepPolicy(minimum=40, maximum=40, target_spread=0.0, seconds=60.0)
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=steps), disturb)
    (event,) = [event for event in run.events[0] if isinstance(event, MeasuredEvent)]
    assert max(event.boundary_seconds + event.accumulate_seconds) > 0.9 * DISTURBED_SECONDS
    measurement = records_of(run)[0].measurement
    assert measurement is not None
    assert measurement.boundary_seconds < 0.5 * DISTURBED_SECONDS
    assert measurement.accumulate_seconds is not None
    assert measurement.accumulate_seconds < 0.5 * DISTURBED_SECONDS


def test_a_fit_with_hardly_any_memory_left_is_a_warning(bench: FaultyBench, tmp_path: Path) -> None:
    """The limit is moved to just above what the trial takes: up when it runs out, down when it has room to spare."""
    limit, thin = GIB, False
    for index in range(24):
        (record,) = records_of(bench.run(tiny_trial(tmp_path / f"{index}", 4, memory_limit=limit)))
        if record.measurement is None:
            assert record.outcome.kind == "gpu_oom"
            limit += limit // 100  # in larger steps it may hop from too little to room to spare and back
            continue
        thin = record.measurement.peak_device > 0.97 * limit
        assert any("thin headroom" in warning for warning in record.warnings) == thin
        if thin:
            break
        limit = int(record.measurement.peak_device / 0.985)
    assert thin
