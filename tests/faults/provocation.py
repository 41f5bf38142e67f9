"""From a test to the inside of a server or rank: see `inside`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from helpers import WORLD_SIZE, Bench, bundled_workload, make_candidate

from ladder.events.outcome import Outcome, Record
from ladder.events.protocol import Event, StepEvent
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import judge
from ladder.launch.watch import now

ENDLESS = StepPolicy(minimum=100_000, maximum=100_000)


@dataclass(frozen=True)
class Provocation:
    """Makes a process do what a function of `inside` does."""

    file: Path

    def __call__(self, process: psutil.Process, fault: str) -> None:
        self.happened_file.unlink(missing_ok=True)
        self.file.write_text(fault)
        process.send_signal(signal.SIGUSR1)

    @property
    def happened_file(self) -> Path:
        return self.file.with_suffix(".happened")

    def happened(self) -> list[str]:
        """What the fault left as proof that it happened."""
        return self.happened_file.read_text().splitlines() if self.happened_file.exists() else []


@dataclass
class FaultyBench(Bench):
    """A bench whose processes do on request what no test can do to them from outside."""

    provoke: Provocation = field(kw_only=True)


@dataclass
class Once:
    """A listener that does something at the first event that `when` accepts, and remembers the trial's processes."""

    bench: Bench
    when: Callable[[int, Event], bool]
    act: Callable[[], Any]
    at: float = 0.0
    processes: list[psutil.Process] = field(default_factory=list)

    def __call__(self, rank: int, event: Event) -> None:
        if not self.at and self.when(rank, event):
            self.at, self.processes = now(), self.bench.ranks()
            assert len(self.processes) >= WORLD_SIZE
            self.act()


def a_step_of(rank: int) -> Callable[[int, Event], bool]:
    return lambda heard, event: heard == rank and isinstance(event, StepEvent)


def records_of(run: TrialRun) -> list[Record]:
    candidates = [make_candidate(micro_batch=spec.micro_batch, accumulation=2) for spec in run.spec.candidates]
    return judge(run, bundled_workload(), candidates)


def outcome_of(run: TrialRun) -> Outcome:
    """The outcome of the one candidate that did not fit."""
    (outcome,) = [record.outcome for record in records_of(run) if record.outcome.kind != "fits"]
    return outcome
