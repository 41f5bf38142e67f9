"""The loop: policy → launch → verdict → history, until the policy says stop; then the proof of fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.candidates import Candidate, Rung
from ladder.errors import EnvironmentFaultError
from ladder.events.outcome import Outcome, Record
from ladder.events.protocol import StepPolicy, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import apart, false_start, judge, trial_seconds
from ladder.launch.base import Launcher
from ladder.machine.machine import Machine
from ladder.runs.history import History
from ladder.search.auto import remaining
from ladder.search.belief import believe
from ladder.search.cost import expected_seconds
from ladder.search.knobs import less_noise
from ladder.search.policy import Measure, Prove, Stop, Strategy, answer, proof
from ladder.search.relevance import relevant
from ladder.search.space import PARITY, Space, disproved, fastest, measured, ranking, same_steps
from ladder.tuning.knob_study import next_knobs
from ladder.tuning.parity import Parity, as_parity_candidate, as_plain, compare, losses_of, parity_trial
from ladder.tuning.refusal import less_disproved, refusals
from ladder.tuning.trial_request import (
    PROOF_SECONDS,
    PROOF_STEPS,
    candidate_spec,
    engine_config,
    trial_deadlines,
    trial_spec,
)
from ladder.tuning.tune_events import Note, Subscriber, TrialBegins, TrialEnds, hearing, ignore
from ladder.workload.workload import Workload

_MAX_FALSE_STARTS = 3
_PRECISE_STEPS = {"minimum": PROOF_STEPS, "seconds": PROOF_SECONDS}


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a tune leaves: the space, everything measured, and how it ended."""

    space: Space
    unsupported: dict[Rung, str]
    records: list[Record]
    answer: Record | None
    """The proof record of the winner; None if nothing is proven."""
    best_so_far: Record | None
    """The fastest measured candidate, proven or not."""
    stopped: str
    """Why the search ended."""
    cancelled: bool
    seconds: float
    out_of_time: bool = False
    """The time budget is spent, so that candidates may be left that were worth a trial."""


class Tuner:
    """Drives one tune. It keeps no state of its own but the clock: everything else is in the history."""

    def __init__(
        self,
        *,
        workload: Workload,
        machine: Machine,
        space: Space,
        unsupported: dict[Rung, str],
        history: History,
        launcher: Launcher,
        tell: Subscriber = ignore,
        cancelled: Callable[[], bool] = lambda: False,
        steps: StepPolicy | None = None,
        time_budget: float | None = None,
        swap_prefix: str = "ladder-swap",
        save_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        knob_trials: int = 0,
        parity: bool = False,
    ) -> None:
        """`clock` is what the time budget is counted on, in seconds: the launcher's own where time is simulated.

        `knob_trials` settings of the winner's DeepSpeed knobs are tried, as far as the time budget allows. With
        `parity` the losses of what is to be proven are compared with the plain rung's first.
        """
        self._workload, self._machine, self._space, self._unsupported = workload, machine, space, unsupported
        self._history, self._launcher, self._tell, self._cancelled = history, launcher, tell, cancelled
        self._steps = steps or StepPolicy()
        self._budget, self._swap_prefix, self._save_folder = time_budget, swap_prefix, save_folder
        self._false_starts, self._knob_trials = 0, knob_trials
        self._has_saved = False
        self._parity, self._plain_losses = parity, dict[tuple[str, bool], list[float]]()
        self._clock, self._began = clock, clock()
        self._first_trial, _ = history.next_trial()

    @property
    def _records(self) -> list[Record]:
        """What the history says about this tune's space."""
        return relevant(self._space, self._history.records, self._first_trial)

    def tune(self, strategy: Strategy) -> TuneResult:
        """Search, then prove; what fails its proof does not fit, so that the search goes on with that."""
        stopped = self._search(strategy)
        self._turn_knobs()
        while self._prove():
            stopped = self._search(strategy)
            self._turn_knobs()
        records = self._records
        return TuneResult(
            space=self._space,
            unsupported=self._unsupported,
            records=records,
            answer=answer(records),
            best_so_far=fastest(less_noise(self._space, records)),
            stopped=stopped,
            cancelled=self._cancelled(),
            seconds=self._clock() - self._began,
            out_of_time=self._out_of_time(),
        )

    def _search(self, strategy: Strategy) -> str:
        while not self._cancelled():
            records = less_disproved(self._records)
            if self._out_of_time():
                left = remaining(self._space, records)
                spent = f"the time budget of {self._budget:g} s is spent"
                return f"{spent}; {left.sentence()}" if left is not None else spent
            decision = strategy(self._space, records)
            if isinstance(decision, Stop):
                return decision.reason
            if not records:
                self._warn_of_small_budget(decision)
            self._measure(decision)
        return "the tune was interrupted"

    def _turn_knobs(self) -> None:
        while self._knob_trials and not self._cancelled() and not self._out_of_time():
            decision = next_knobs(self._space, less_disproved(self._records), self._knob_trials)
            if isinstance(decision, Stop):
                return
            self._measure(decision)

    def _out_of_time(self) -> bool:
        return self._budget is not None and self._clock() - self._began > self._budget

    def _warn_of_small_budget(self, first: Measure) -> None:
        """A trial that has begun measures its first candidate whatever the budget; the user should know beforehand."""
        needed = expected_seconds([believe(self._space, ()).outlook(first.candidates[0])])
        if self._budget is not None and needed > self._budget:
            warning = (
                f"Warning: the time budget of {self._budget:g} s is less than one trial is expected to take "
                f"({needed:.0f} s): the first candidate is measured all the same, and proven if it fits."
            )
            self._tell(Note(warning))

    def _prove(self) -> bool:
        """Prove the fastest, and those that its own proof made look faster; True as soon as one fails its proof."""
        while not self._cancelled():
            decision = self._next_proof()
            if isinstance(decision, Stop):
                break
            self._run_proof(decision)
            if decision.candidate.key in disproved(self._records):
                return True
        return False

    def _next_proof(self) -> Prove | Stop:
        """What to prove; once more the answer of an earlier start if this one is to save weights and has saved none."""
        decision, found = proof(self._space, self._records), answer(self._records)
        if isinstance(decision, Prove) or found is None or self._save_folder is None or self._has_saved:
            return decision
        return Prove(self._space.by_key[found.candidate_key], "proven before, and its weights are to be saved")

    def _measure(self, decision: Measure) -> None:
        refused = self._refuse(decision.candidates)
        candidates = tuple(candidate for candidate in decision.candidates if candidate.key not in refused)
        if candidates:
            # What was decided about the first candidate says nothing about another one in its place.
            within = decision.first_within if candidates[0] == decision.candidates[0] else {}
            self._run(replace(decision, candidates=candidates, first_within=within), proving=False)

    def _refuse(self, candidates: Sequence[Candidate]) -> set[str]:
        """Record those that the host has no memory for, as a trial of their own that starts no process."""
        name, _ = self._history.next_trial()
        records = refusals(candidates, name, self._space, self._records)
        if records:
            self._add(records, {})
        for record in records:
            self._tell(Note(f"trial {name}: {record.candidate_key} is {record.outcome.sentence}"))
        return {record.candidate_key for record in records}

    def _run_proof(self, decision: Prove) -> None:
        candidate = decision.candidate
        parity = self._compare_losses(candidate) if self._parity else Parity(agrees=True)
        if parity.agrees is False:
            outcome = Outcome(kind="crash", moment=PARITY, sentence=parity.sentence)
            name, _ = self._history.next_trial()
            # The same is true of the micro-batches that were measured beside it.
            fits = [record.candidate_key for record in ranking(self._records)]
            alike = [key for key in fits if same_steps(self._space.by_key[key], candidate)]
            self._add([Record(candidate_key=key, trial=name, purpose="proof", outcome=outcome) for key in alike], {})
            self._tell(Note(f"{candidate.key} is not the answer: {parity.sentence}."))
        elif not self._cancelled():
            warnings = (parity.sentence,) if parity.sentence else ()
            wanted = Measure(candidate.engine, (candidate,), decision.reason)
            self._has_saved = self._run(wanted, proving=True, warnings=warnings)

    def _compare_losses(self, candidate: Candidate) -> Parity:
        own, plain = as_parity_candidate(candidate), as_plain(candidate)
        if own == plain:
            return Parity(agrees=True)
        same_data = own.engine.shares_sequences
        against = plain.key, same_data
        if not self._plain_losses.get(against):
            self._plain_losses[against] = self._losses(plain, same_data)
        return compare(self._losses(own, same_data), self._plain_losses[against], candidate.engine, plain.engine)

    def _losses(self, candidate: Candidate, same_data: bool) -> list[float]:
        """Of a shallow model. EnvironmentFaultError if again and again it could not be started."""
        while True:
            run, why = self._shallow_trial(candidate, same_data)
            self._count_false_starts(why)
            if not why or self._cancelled():
                return losses_of(run)

    def _shallow_trial(self, candidate: Candidate, same_data: bool) -> tuple[TrialRun, str]:
        """The trial, and why it was a false start if it was. What it measures is no record: the model is another."""
        wanted = Measure(candidate.engine, (candidate,), "its losses on a shallow model")
        spec = self._spec(*self._history.next_trial(), wanted, False)
        spec = parity_trial(spec, self._workload.model, same_data=same_data)
        self._tell(TrialBegins(spec, wanted.reason))
        run = self._launcher.run(spec, trial_deadlines(self._workload, wanted.engine), hearing(self._tell))
        self._history.note_seconds(spec.trial, trial_seconds(run))
        self._tell(TrialEnds(run, ()))
        _require_environment(run)
        return run, false_start(run, judge(run, self._workload, wanted.candidates))

    def _run(self, wanted: Measure, *, proving: bool, warnings: tuple[str, ...] = ()) -> bool:
        """Whether it came to an end of its own. EnvironmentFaultError where the machine is in no state for another."""
        candidates = wanted.candidates
        name, folder = self._history.next_trial()
        spec = self._spec(name, folder, wanted, proving)
        self._tell(TrialBegins(spec, wanted.reason))
        run = self._launcher.run(spec, trial_deadlines(self._workload, wanted.engine), hearing(self._tell))
        records = self._completed(judge(run, self._workload, candidates), proving, warnings)
        why = false_start(run, records)
        if why or (run.stop is not None and run.stop.kind in ("cancelled", "environment")):
            # What was measured stands; the candidate that was cut off has no outcome of its own.
            records = [record for record in records if record.outcome.kind == "fits"]
        unsaved = _unsaved(spec, records)
        if unsaved:
            records = []  # the candidate may well fit, and its earlier proof holds
        self._add(records, trial_seconds(run))
        self._tell(TrialEnds(run, tuple(records)))
        _require_environment(run)
        if unsaved:
            raise EnvironmentFaultError(f"The weights were not saved: {unsaved}; choose another --save-weights.")
        self._count_false_starts(why)
        return not why and run.stop is None

    def _completed(self, records: Sequence[Record], proving: bool, warnings: tuple[str, ...]) -> list[Record]:
        """`records` with what the tune has to say about them."""
        trials = measured(self._records) if proving else {}
        complete = []
        for record in records:
            said = (*record.warnings, *warnings, apart(record, trials.get(record.candidate_key)))
            outcome = record.outcome
            if outcome.kind == "host_oom":
                outcome = replace(outcome, host_memory=self._space.host_memory)
            swaps = "nvme" in self._space.by_key[record.candidate_key].engine.rung.devices
            complete.append(
                replace(
                    record,
                    outcome=outcome,
                    warnings=tuple(filter(None, said)),
                    nvme_path=self._space.nvme_path if swaps else None,
                )
            )
        return complete

    def _add(self, records: Sequence[Record], seconds: dict[str, float]) -> None:
        candidates = {record.candidate_key: self._space.by_key[record.candidate_key] for record in records}
        self._history.add(records, candidates, seconds)

    def _count_false_starts(self, why: str) -> None:
        """A trial that never got as far as its engine is tried again; again and again, that is no candidate's fault."""
        self._false_starts = self._false_starts + 1 if why else 0
        if self._false_starts == _MAX_FALSE_STARTS:
            raise EnvironmentFaultError(
                f"{why} ({_MAX_FALSE_STARTS} times in a row); see {self._history.folder / 'server.log'}, the last "
                "trial's files and the kernel's log, then start the same command again."
            )

    def _spec(self, name: str, folder: Path, wanted: Measure, proving: bool) -> TrialSpec:
        machine = self._machine
        workload = self._space.shallow if wanted.probe else self._workload
        best = fastest(self._records)
        tokens_per_step = workload.global_batch_size * workload.seq_len
        speed = best.tokens_per_second if best is not None and not proving and not wanted.probe else None
        beat = tokens_per_step / speed if speed else None
        return trial_spec(
            name,
            folder,
            workload,
            machine,
            wanted.engine,
            engine_config(
                workload,
                wanted.candidates,
                machine.world_size,
                machine.nvme_path / f"{self._swap_prefix}-{name}" if machine.nvme_path else None,
            ),
            [candidate_spec(each, beat, wanted.first_within.get(each.key)) for each in wanted.candidates],
            steps=self._steps.model_copy(update=_PRECISE_STEPS) if proving or wanted.precise else self._steps,
            proof=proving,
            probe=wanted.probe,
            stop_at=None if proving or self._budget is None else self._began + self._budget,
            save_folder=str(self._save_folder) if proving and self._save_folder else None,
        )


def _unsaved(spec: TrialSpec, records: Sequence[Record]) -> str:
    """Why a proof could not save its weights, where that is the fault of the folder they were to be saved in."""
    ends = [record.outcome for record in records] if spec.save_folder else []
    crashed = (each for each in ends if each.kind == "disk_full" or (each.kind == "crash" and each.moment == "gather"))
    return next((each.sentence for each in crashed), "")


def _require_environment(run: TrialRun) -> None:
    """EnvironmentFaultError if the trial left the machine in no state for another one."""
    if run.stop is not None and run.stop.kind == "environment":
        raise EnvironmentFaultError(run.stop.sentence)
