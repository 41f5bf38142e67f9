"""The state behind the live view: what a tune's events have shown so far."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ladder.candidates import Rung
from ladder.events.outcome import Record
from ladder.events.protocol import Event, FailedEvent, MeasuredEvent, PhaseEvent, StepEvent, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import judge, trial_seconds
from ladder.report.rest import Rest, rest, trial_estimate
from ladder.search.belief import Belief, believe
from ladder.search.cost import COMPARISONS
from ladder.search.policy import answer
from ladder.search.space import Space, fastest, measured
from ladder.tuning.tune_events import RankReported, SearchBegins, TrialBegins, TrialEnds, TuneEvent


@dataclass
class CurrentTrial:
    """The running trial."""

    spec: TrialSpec
    reason: str
    began: float
    """Seconds on CLOCK_MONOTONIC."""
    expected: float | None
    """Seconds that it was expected to take."""
    phase: str = "start"
    candidate: str | None = None
    num_steps: int = 0
    """Micro-steps of `candidate` so far, on the rank that has done most."""
    step_seconds: float | None = None
    steps_by_rank: dict[int, int] = field(default_factory=dict)
    measured_by_rank: dict[int, list[MeasuredEvent]] = field(default_factory=dict)

    def begin(self, candidate: str | None) -> None:
        """The ranks have moved on to `candidate`, or to a phase without one."""
        self.candidate = candidate
        self.num_steps = 0
        self.step_seconds = None
        self.steps_by_rank = {}


class Progress:
    """Handles the events of a tune. Collections are replaced and not changed in place, as another thread reads them."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.space: Space | None = None
        self.unsupported: Mapping[Rung, str] = {}
        self.records: tuple[Record, ...] = ()
        self.fresh: tuple[Record, ...] = ()
        """What the running trial has measured so far; its final records may differ."""
        self.trial: CurrentTrial | None = None
        self.peaks: dict[str, tuple[int, ...]] = {}
        """By candidate key: each rank's peak memory in bytes, if measured since this process started."""
        self.rest: Rest | None = None
        """The estimate of the time left, made before the running trial began."""
        self.on_paper = False
        self._belief: Belief | None = None
        """Predictions calibrated by `records`. Kept because computing it takes most of the view's time."""
        self._expected = self._taken = 0.0
        self._num_compared = 0

    def __call__(self, event: TuneEvent) -> None:
        """Handle the next event of the tune."""
        match event:
            case SearchBegins():
                self.space, self.unsupported, self.records = event.space, event.unsupported, tuple(event.records)
                self.on_paper = event.on_paper
                self._estimate()
            case TrialBegins(spec=spec, reason=reason):
                expected = trial_estimate(self._belief, spec) if self._belief is not None else None
                self.trial = CurrentTrial(spec=spec, reason=reason, began=time.monotonic(), expected=expected)
            case RankReported() if self.trial is not None:
                self._hear(self.trial, event.rank, event.event)
            case TrialEnds():
                self._close(event)

    def rows(self) -> dict[str, list[Record]]:
        """What was measured, by engine, in the order of the ladder; an empty list for an engine not tried yet."""
        if self.space is None:
            return {}
        rows: dict[str, list[Record]] = {engine.key: [] for engine in self.space.engines}
        for key, record in measured((*self.records, *self.fresh)).items():
            if key in self.space.by_key:
                rows.setdefault(self.space.by_key[key].engine.key, []).append(record)
        return rows

    @property
    def best(self) -> Record | None:
        """The proven answer, or else the fastest candidate that fits so far."""
        return answer(self.records) or fastest((*self.records, *self.fresh))

    def left(self, now: float) -> tuple[float, float] | None:
        """The least and most seconds until the answer is proven; None if unknown or simulated.

        Never less than what has to follow the running trial, even if that takes longer than expected.
        """
        if self.rest is None or self.on_paper:
            return None
        rest, trial = self.rest, self.trial
        if trial is None:
            return rest.least, rest.most
        after = 0.0 if trial.spec.proof else rest.proof if trial.spec.parity else rest.proof + rest.comparisons
        spent = now - trial.began
        return max(after, rest.least - spent), max(after, rest.most - spent)

    def is_overdue(self, now: float) -> bool:
        """Whether the running trial takes longer than expected."""
        trial = self.trial
        return trial is not None and trial.expected is not None and now - trial.began > trial.expected

    def _hear(self, trial: CurrentTrial, rank: int, event: Event) -> None:
        if isinstance(event, PhaseEvent):
            if event.candidate != trial.candidate:
                trial.begin(event.candidate)
            trial.phase = event.phase
        elif isinstance(event, StepEvent):
            trial.steps_by_rank[rank] = trial.steps_by_rank.get(rank, 0) + 1
            trial.num_steps, trial.step_seconds = max(trial.steps_by_rank.values()), event.seconds
        elif isinstance(event, MeasuredEvent):
            if trial.spec.parity or trial.spec.probe:
                return  # measured with a few layers only, so not the candidate's own figures
            seen = dict(enumerate(self.peaks.get(event.candidate, (0,) * trial.spec.world_size)))
            seen[rank] = event.peak_device
            self.peaks = {**self.peaks, event.candidate: tuple(seen.values())}
            trial.measured_by_rank.setdefault(rank, []).append(event)
            self.fresh = self._measured_so_far(trial)
        elif isinstance(event, FailedEvent):
            trial.phase = event.outcome

    def _close(self, ended: TrialEnds) -> None:
        if self.trial is not None and self.trial.expected:
            self._expected += self.trial.expected
            self._taken += sum(trial_seconds(ended.run).values())
        self._num_compared += ended.run.spec.parity
        self.trial, self.fresh = None, ()
        self.records = (*self.records, *ended.records)
        self._estimate()

    def _measured_so_far(self, trial: CurrentTrial) -> tuple[Record, ...]:
        if self.space is None:
            return ()
        events: list[list[Event]] = [
            list(trial.measured_by_rank.get(each, ())) for each in range(trial.spec.world_size)
        ]
        candidates = [self.space.by_key[each.key] for each in trial.spec.candidates]
        return tuple(judge(TrialRun(spec=trial.spec, events=events), self.space.workload, candidates))

    def _estimate(self) -> None:
        if self.space is not None:
            pace = self._taken / self._expected if self._expected else 1.0
            self._belief = believe(self.space, self.records)
            comparisons = 0 if self.on_paper else max(0, COMPARISONS - self._num_compared)
            self.rest = rest(self._belief, self.records, comparisons).times(pace)
