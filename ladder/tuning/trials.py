"""Runs the trials of one tune, and writes their results into the history."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ladder.candidates import Candidate, Engine
from ladder.errors import EnvironmentFaultError
from ladder.events.outcome import Record
from ladder.events.promise import apart, new_lengths, paced_by_cpu
from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import false_start, judge, killed_by_somebody, trial_seconds
from ladder.runs.history import History
from ladder.search.cost import PROOF_SECONDS, PROOF_STEPS
from ladder.search.policy import Measure
from ladder.search.relevance import relevant
from ladder.search.space import Space, fastest, measured
from ladder.tuning.own_script import script_spec, with_preparation
from ladder.tuning.parity import losses_of, parity_trial
from ladder.tuning.trial_request import (
    candidate_spec,
    engine_config,
    proof_steps,
    trial_deadlines,
    trial_spec,
)
from ladder.tuning.tune_events import Note, Subscriber, TrialBegins, TrialEnds, hearing
from ladder.tuning.venues.base import OpenVenue

_MAX_FALSE_STARTS = 3
"""After this many trials in a row that fail before they reach their engine, the tune ends. Chosen: one may be chance,
but the third shows that the machine is at fault."""
_PRECISE_STEPS = {"minimum": PROOF_STEPS, "seconds": PROOF_SECONDS}


@dataclass(kw_only=True, eq=False)
class Trials:
    """Runs the trials of one tune, one after another, and writes what they measured into its history."""

    place: OpenVenue
    """Where they run."""
    space: Space
    history: History
    tell: Subscriber
    cancelled: Callable[[], bool]
    steps: StepPolicy
    """How long a candidate is timed, except in a proof or a precise trial."""
    save_folder: Path | None
    """Where a proof saves the weights."""
    _first_trial: str = field(init=False)
    _false_starts: int = field(init=False, default=0)
    _killed: set[Engine] = field(init=False, default_factory=set)
    """The engines of which a rank was killed from outside once."""

    def __post_init__(self) -> None:
        self._first_trial, _ = self.history.next_trial()

    @property
    def records(self) -> list[Record]:
        """The records of the history that belong to this tune's space."""
        return relevant(self.space, self.history.records, self._first_trial)

    def add(self, records: Sequence[Record], seconds: dict[str, float]) -> None:
        """Write the records of one trial into the history, with its seconds by phase."""
        candidates = {record.candidate_key: self.space.by_key[record.candidate_key] for record in records}
        self.history.add(records, candidates, seconds)

    def run(
        self,
        wanted: Measure,
        *,
        proving: bool,
        warnings: tuple[str, ...] = (),
        stop_at: float | None = None,
        timed: float = math.inf,
    ) -> bool:
        """Run a trial; True if it ended by itself. EnvironmentFaultError if the machine cannot run another one.

        No candidate but the first begins after `stop_at`, on the launcher's clock. A proof is timed for at most `timed`
        seconds, unless its fewest steps take longer.
        """
        if not self._can_begin(wanted.engine):
            return False
        spec = self._spec(wanted, proving, stop_at, timed)
        run = self._launched(spec, wanted)
        records = self._completed(judge(run, self.space.workload, wanted.candidates), proving, warnings)
        why = false_start(run, records)
        killed = "" if why else self._killed_once(run, records, wanted.engine)
        if why or killed or (run.stop is not None and run.stop.kind in ("cancelled", "environment")):
            # Keep what was measured; the candidate that was interrupted has no outcome.
            records = [record for record in records if record.outcome.kind == "fits"]
        unsaved = _unsaved(spec, records)
        if unsaved:
            records = []  # the candidate may well fit, and its earlier proof holds
        self.add(records, trial_seconds(run))
        self.tell(TrialEnds(run, tuple(records)))
        if killed:
            self.tell(
                Note(f"trial {spec.trial}: {killed}, by something outside ladder; the engine is tried once more.")
            )
        _require_environment(run)
        if unsaved:
            raise EnvironmentFaultError(f"The weights were not saved: {unsaved}; choose another --save-weights.")
        self._count_false_starts(why)
        return not why and not killed and run.stop is None

    def losses(self, candidate: Candidate, same_data: bool) -> list[float]:
        """The losses of `candidate` on a shallow model. EnvironmentFaultError if it repeatedly fails to start."""
        if not self._can_begin(candidate.engine):
            return []
        while True:
            run, why, killed = self._run_shallow(candidate, same_data)
            self._count_false_starts(why)
            if not (why or killed) or self.cancelled():
                return losses_of(run)

    def shallow_trial(self, candidate: Candidate, same_data: bool) -> TrialSpec:
        """The trial of `losses`."""
        return parity_trial(self._spec(_shallow(candidate), False), self.space.workload.model, same_data=same_data)

    def _run_shallow(self, candidate: Candidate, same_data: bool) -> tuple[TrialRun, str, str]:
        """The trial, why it was a false start, and who of it was killed. It leaves no records: the model is another."""
        spec, wanted = self.shallow_trial(candidate, same_data), _shallow(candidate)
        run = self._launched(spec, wanted)
        self.history.note_seconds(spec.trial, trial_seconds(run))
        self.tell(TrialEnds(run, ()))
        _require_environment(run)
        records = judge(run, self.space.workload, wanted.candidates)
        why = false_start(run, records)
        return run, why, "" if why else self._killed_once(run, records, candidate.engine)

    def _killed_once(self, run: TrialRun, records: Sequence[Record], engine: Engine) -> str:
        """Who of the trial was killed from outside, if none of this engine's was before: it is then tried again."""
        killed = killed_by_somebody(run, records) if engine not in self._killed else ""
        self._killed |= {engine} if killed else set()
        return killed

    def _can_begin(self, engine: Engine) -> bool:
        """Wait for what a trial of `engine` needs; False if the tune is cancelled before that."""
        if self.place.operators is None:
            return True
        self.place.operators.need(engine.rung)
        return not self.cancelled()

    def _launched(self, spec: TrialSpec, wanted: Measure) -> TrialRun:
        self.tell(TrialBegins(spec, wanted.reason))
        deadlines = trial_deadlines(self.space.workload, wanted.engine)
        try:
            return self.place.launcher.run(spec, with_preparation(deadlines, self.space.workload), hearing(self.tell))
        finally:
            if spec.script is not None:
                shutil.rmtree(spec.script.scratch, ignore_errors=True)

    def _completed(self, records: Sequence[Record], proving: bool, warnings: tuple[str, ...]) -> list[Record]:
        """`records` with warnings and facts that only the tune knows."""
        trials = measured(self.records) if proving else {}
        complete = []
        for record in records:
            candidate = self.space.by_key[record.candidate_key]
            trial = trials.get(candidate.key)
            of_speed = [apart(record, trial)]
            if proving:
                of_speed += [paced_by_cpu(candidate, record), new_lengths(candidate, trial)]
            said = (*record.warnings, *warnings, *of_speed)
            outcome = record.outcome
            if outcome.kind == "host_oom":
                outcome = replace(outcome, host_memory=self.space.host_memory)
            swaps = "nvme" in candidate.engine.rung.devices
            complete.append(
                replace(
                    record,
                    outcome=outcome,
                    warnings=tuple(filter(None, said)),
                    nvme_path=self.space.nvme_path if swaps else None,
                )
            )
        return complete

    def _count_false_starts(self, why: str) -> None:
        """Count trials that failed before they reached their engine. EnvironmentFaultError after too many in a row."""
        self._false_starts = self._false_starts + 1 if why else 0
        if self._false_starts == _MAX_FALSE_STARTS:
            raise EnvironmentFaultError(
                f"{why} ({_MAX_FALSE_STARTS} times in a row); see {self.history.folder / 'server.log'}, the last "
                "trial's files and the kernel's log, then start the same command again."
            )

    def _spec(self, wanted: Measure, proving: bool, stop_at: float | None = None, timed: float = math.inf) -> TrialSpec:
        name, folder = self.history.next_trial()
        machine, workload = self.place.machine, self.space.shallow if wanted.probe else self.space.workload
        swap_folder = machine.nvme_path / f"{self.place.swap_prefix}-{name}" if machine.nvme_path else None
        config = engine_config(workload, wanted.candidates, machine.world_size, swap_folder, proving=proving)
        precise = proof_steps(workload) if proving else _PRECISE_STEPS
        precise = {**precise, "seconds": min(precise["seconds"], timed)}
        beat = None if proving or wanted.probe else self._seconds_to_beat()
        return trial_spec(
            name,
            folder,
            workload,
            machine,
            wanted.engine,
            config,
            [candidate_spec(each, beat, wanted.first_within.get(each.key)) for each in wanted.candidates],
            script=None if wanted.probe else script_spec(workload, wanted.candidates[0], machine, config, folder),
            steps=replace(self.steps, **precise) if proving or wanted.precise else self.steps,
            proof=proving,
            probe=wanted.probe,
            stop_at=stop_at,
            save_folder=str(self.save_folder) if proving and self.save_folder else None,
        )

    def _seconds_to_beat(self) -> float | None:
        """The time of an optimizer step of the fastest candidate so far."""
        best = fastest(self.records)
        if best is None or not best.tokens_per_second:
            return None
        return self.space.workload.tokens_per_step / best.tokens_per_second


def _shallow(candidate: Candidate) -> Measure:
    return Measure(candidate.engine, (candidate,), "its losses on a shallow model")


def _unsaved(spec: TrialSpec, records: Sequence[Record]) -> str:
    """Why a proof could not save its weights, if the folder for them is the cause; otherwise empty."""
    ends = [record.outcome for record in records] if spec.save_folder else []
    crashed = (each for each in ends if each.kind == "disk_full" or (each.kind == "crash" and each.moment == "gather"))
    return next((each.sentence for each in crashed), "")


def _require_environment(run: TrialRun) -> None:
    """EnvironmentFaultError if the machine cannot run another trial after this one."""
    if run.stop is not None and run.stop.kind == "environment":
        raise EnvironmentFaultError(run.stop.sentence)
