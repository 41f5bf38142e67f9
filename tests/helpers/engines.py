"""Trials of an engine with its techniques, and what their ranks measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.values import TINY, WORLD_SIZE, tiny_trial
from ladder.backends.registry import backend_of
from ladder.events.protocol import DoneEvent, FailedEvent, MeasuredEvent, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.techniques.keys import engine_named
from ladder.tuning.trial_request import environment_of, rank_modules_of
from ladder.workload.workload import Workload


def engine_trial(
    folder: Path, name: str, *micro_batches: int, ranks: int = WORLD_SIZE, accumulation: int = 2, **changes: Any
) -> TrialSpec:
    """As `tiny_trial`, of the engine with this `name`, such as `zero3+hpz=2`; micro-batch 1 if none is given."""
    engine, sizes = engine_named(name), micro_batches or (1,)
    spec = tiny_trial(folder, *sizes, rung=engine.rung.name, ranks=ranks, accumulation=accumulation)
    batch = ranks * accumulation
    workload = Workload(model=TINY, task=spec.task, seq_len=spec.seq_len, global_batch_size=batch)
    configuration = backend_of(engine.rung).configuration(
        workload, engine, micro_batch=sizes[0], accumulation=accumulation, world_size=ranks, nvme_path=None
    )
    told: dict[str, Any] = {
        "deepspeed": configuration,
        "techniques": tuple(technique.label for technique in engine.techniques),
        "environment": environment_of(engine, ranks),
        "rank_modules": rank_modules_of(engine),
        "shares_sequences": engine.shares_sequences,
    }
    return replace(spec, **(told | changes))


def failures(run: TrialRun) -> list[FailedEvent]:
    return [event for events in run.events for event in events if isinstance(event, FailedEvent)]


def measured(run: TrialRun) -> list[list[MeasuredEvent]]:
    """What each rank measured of each candidate. If a rank failed, so does the test, with the rank's traceback."""
    assert not failures(run), failures(run)[0].traceback
    assert all(isinstance(events[-1], DoneEvent) for events in run.events), run.stop
    found = [[event for event in events if isinstance(event, MeasuredEvent)] for events in run.events]
    assert {len(events) for events in found} == {len(run.spec.candidates)}
    return found
