"""The main loop: policy → launch → verdict → history, until the policy says stop; then the proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ladder.candidates import Candidate, Rung
from ladder.events.outcome import Outcome, Record
from ladder.events.step_policy import StepPolicy
from ladder.runs.history import History
from ladder.search.auto import auto
from ladder.search.belief import believe
from ladder.search.cost import COMPARISONS, expected_seconds
from ladder.search.first_proof import first_proof
from ladder.search.knobs import less_noise
from ladder.search.policy import Measure, Prove, Stop, Strategy, answer, proof
from ladder.search.script_faults import is_beyond_doubt
from ladder.search.space import PARITY, Space, disproved, fastest, measured, proven, ranking, same_steps
from ladder.search.time_left import TimeLeft, by_promise, within
from ladder.tuning.knob_study import next_knobs
from ladder.tuning.operators import Building
from ladder.tuning.parity import Comparisons, Parity
from ladder.tuning.reach import less_disproved, refusals
from ladder.tuning.trials import Trials
from ladder.tuning.tune_events import Note, Subscriber, ignore
from ladder.tuning.venues.base import OpenVenue


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of a tune: the space, everything measured, and how it ended."""

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
    """The time budget ended the search, so candidates that were worth a trial may be left."""
    first: FirstAnswer | None = None
    """What was proven before the search went on."""


@dataclass(frozen=True)
class FirstAnswer:
    """A candidate that was proven while the search went on."""

    proof: Record
    seconds: float
    """Of the tune until then."""


@dataclass(kw_only=True, eq=False)
class Tuner:
    """Runs one tune. Its results are in the history, so another start continues from there."""

    place: OpenVenue
    """Where its trials run."""
    space: Space
    unsupported: dict[Rung, str]
    """Rungs that cannot work here, and why."""
    history: History
    tell: Subscriber = ignore
    cancelled: Callable[[], bool] = lambda: False
    """Whether the user has asked the tune to end."""
    steps: StepPolicy = field(default_factory=StepPolicy)
    time_budget: float | None = None
    """Seconds that the tune may take, proof and files included."""
    spent: float = 0.0
    """Seconds of them that passed before this search."""
    after: float = 0.0
    """Seconds of them that the tune needs after the proof."""
    save_folder: Path | None = None
    aside: Space | None = None
    """A wider space, of which trials run while an operator is built that the next trial of `space` needs."""
    knob_trials: int | None = 0
    """Settings of the winner's DeepSpeed knobs to try, as far as the time budget allows; None for those in doubt."""
    deliver: Callable[[TuneResult], None] = lambda result: None
    """Writes a first answer before the search goes on."""
    comparisons: Comparisons | None = None
    """Compares a candidate's losses with the reference engine's before its proof."""
    _trials: Trials = field(init=False)
    _aside: Trials = field(init=False)
    _building: Building = field(init=False)
    _began: float = field(init=False)
    _has_saved: bool = field(init=False, default=False)
    _is_late: bool = field(init=False, default=False)
    """The time budget has ended the search."""
    _first: FirstAnswer | None = field(init=False, default=None)
    _unproven: str = field(init=False, default="")
    """What there was no time to prove, besides the answer."""

    def __post_init__(self) -> None:
        self._began = self.place.clock()
        self._trials = self._trials_of(self.space)
        self._aside = self._trials if self.aside is None else self._trials_of(self.aside)
        self._building = Building(
            operators=self.place.operators, machine=self.place.machine, space=self.space, aside=self._aside.space
        )

    def _trials_of(self, space: Space) -> Trials:
        return Trials(
            place=self.place,
            space=space,
            history=self.history,
            tell=self.tell,
            cancelled=self.cancelled,
            steps=self.steps,
            save_folder=self.save_folder,
        )

    def tune(self, strategy: Strategy) -> TuneResult:
        """Search, then prove. A candidate that fails its proof does not fit, and the search continues.

        It ends if a user's own script fails by an error of its own.
        """
        stopped = self._search(strategy)
        self._turn_knobs()
        while self._prove() and not is_beyond_doubt(self.space, self._trials.records):
            stopped = self._search(strategy)
            self._turn_knobs()
        return self._result(f"{stopped}{self._unproven}{self._overrun(self._trials.records)}")

    def _result(self, stopped: str) -> TuneResult:
        records = self._trials.records
        return TuneResult(
            space=self.space,
            unsupported=self.unsupported,
            records=records,
            answer=answer(records),
            best_so_far=fastest(less_noise(self.space, records)),
            stopped=stopped,
            cancelled=self.cancelled(),
            seconds=self._seconds(),
            out_of_time=self._is_late,
            first=self._first,
        )

    def _search(self, strategy: Strategy) -> str:
        while not self.cancelled():
            if (own := self._as_it_stands()) is not None:
                self._measure(own, self._aside)
                continue
            records = less_disproved(self._trials.records)
            decision = self._decide(strategy, records)
            if isinstance(decision, Stop):
                return decision.reason
            if (first := self._first_proof(strategy, records)) is not None:
                self._prove_first(first)
                continue
            self._building.foresee(records)
            if meanwhile := self._building.before(decision, strategy, lambda: self._aside.records, self._time_left):
                self._measure(meanwhile, self._aside)
            else:
                self._measure(decision, self._trials)
        return "the tune was interrupted"

    def _first_proof(self, strategy: Strategy, records: Sequence[Record]) -> Prove | None:
        """The proof of a first answer, if the search goes on after it. Weights are saved of the last answer only."""
        if strategy is not auto or self.save_folder is not None:
            return None
        found = first_proof(self.space, records, comparisons=self._num_comparisons)
        return found if found is not None and self._may_prove(found) else None

    def _prove_first(self, decision: Prove) -> None:
        """Prove it, and write the answer at once."""
        self._run_proof(decision)
        if (found := proven(self._trials.records).get(decision.candidate.key)) is not None:
            self._first = FirstAnswer(found, self._seconds())
            self.deliver(self._result("the search goes on"))

    def _as_it_stands(self) -> Measure | None:
        """The first trial of a user's script: with nothing changed, if that is a candidate and there is time for it."""
        own = self._aside.space.own
        if own is None or own.key in measured(records := self._aside.records):
            return None
        decision, left = Measure(own.engine, (own,), "the script as its command stands"), self._time_left(records)
        return decision if left is None else left.allows(believe(self._aside.space, records), records, decision)

    def _decide(self, strategy: Strategy, records: Sequence[Record]) -> Measure | Stop:
        if (left := self._time_left(records)) is None:
            return strategy(self.space, records)
        decision = within(strategy, self.space, records, left)
        if isinstance(decision, Stop) and decision.late:
            nothing_fits = fastest(records) is None and (not records or left.seconds > 0)
            if nothing_fits and isinstance(first := strategy(self.space, records), Measure):
                return self._measured_anyway(first, left, records)
            self._is_late = True
            return Stop(f"of the time budget of {self.time_budget:g} s, {decision.reason}", late=True)
        return decision

    def _turn_knobs(self) -> None:
        while self.knob_trials != 0 and not self.cancelled():
            records = less_disproved(self._trials.records)
            decision = next_knobs(self.space, records, self.knob_trials)
            left = self._time_left(records)
            if isinstance(decision, Measure) and left is not None:
                decision = left.allows(believe(self.space, records), records, decision) or Stop("no time is left")
            if isinstance(decision, Stop):
                return
            self._measure(decision, self._trials)

    def _time_left(self, records: Sequence[Record]) -> TimeLeft | None:
        """What the time budget still allows; None without one."""
        if self.time_budget is None:
            return None
        return TimeLeft(
            seconds=self.time_budget - self.after - self._seconds(),
            comparisons=self._num_comparisons,
            taken=self.history.trial_seconds(records),
        )

    @property
    def _num_comparisons(self) -> int:
        """Trials that compare losses before the next proof."""
        return COMPARISONS - self.comparisons.has_reference if self.comparisons is not None else 0

    def _seconds(self) -> float:
        return self.spent + self.place.clock() - self._began

    def _measured_anyway(self, first: Measure, left: TimeLeft, records: Sequence[Record]) -> Measure:
        """One candidate while nothing fits, though its proof may end too late; the user is warned once."""
        belief = believe(self.space, records)
        first = replace(first, candidates=(by_promise(belief, first.candidates)[0],), probe=False)
        needed = expected_seconds([belief.outlook(first.candidates[0])])
        needed += left.reserve(belief, records, first.candidates)
        if not records:
            warning = (
                f"Warning: one trial and its proof are expected to take {needed:.0f} s, more than the time budget of "
                f"{self.time_budget:g} s allows. The first candidate is measured anyway, and proven if it fits."
            )
            self.tell(Note(warning))
        return first

    def _overrun(self, records: Sequence[Record]) -> str:
        """What the tune took beyond its budget, and why; empty if nothing."""
        over = self._seconds() + self.after - (self.time_budget or math.inf)
        if over <= 0:
            return ""
        why = "as trials and proof took longer than predicted"
        if len({record.trial for record in records if record.purpose == "measure"}) == 1:
            why = "which is too short for a trial and its proof"
        elif failed := next(iter(disproved(records)), None):
            why = f"as the proof of {failed} failed"
        return f"; {max(1.0, over):.0f} s over the budget, {why}"

    def _prove(self) -> bool:
        """Prove the fastest candidate, and others if its proof made them look faster; True once one fails its proof."""
        while not self.cancelled():
            decision = self._next_proof()
            if isinstance(decision, Stop) or not self._may_prove(decision):
                break
            self._run_proof(decision)
            if decision.candidate.key in disproved(self._trials.records):
                return True
        return False

    def _may_prove(self, decision: Prove) -> bool:
        """Whether there is time to prove another candidate after the first, whose proof the tune owes in any case."""
        records = self._trials.records
        left = self._time_left(records)
        if left is None or not proven(records) or self.save_folder is not None:
            return True
        if left.reserve(believe(self.space, records), records, [decision.candidate]) <= left.seconds:
            return True
        self._unproven = f"; no time was left to prove {decision.candidate.key}, whose trial was faster than the answer"
        return False

    def _next_proof(self) -> Prove | Stop:
        """What to prove next. The answer of an earlier start is proven again if its weights are still to be saved."""
        decision, found = proof(self.space, self._trials.records), answer(self._trials.records)
        if isinstance(decision, Prove) or found is None or self.save_folder is None or self._has_saved:
            return decision
        return Prove(self.space.by_key[found.candidate_key], "proven before, and its weights are to be saved")

    def _measure(self, decision: Measure, trials: Trials) -> None:
        refused = self._refuse(decision.candidates, trials)
        candidates = tuple(candidate for candidate in decision.candidates if candidate.key not in refused)
        if candidates:
            # `first_within` was decided for this first candidate and not for another one in its place.
            slowest = decision.first_within if candidates[0] == decision.candidates[0] else {}
            self._run(replace(decision, candidates=candidates, first_within=slowest), trials)

    def _run(self, decision: Measure, trials: Trials) -> None:
        records, stop_at = trials.records, None
        if (left := self._time_left(records)) is not None:
            stop_at = self.place.clock() + left.last_begin(believe(trials.space, records), records, decision)
        trials.run(decision, proving=False, stop_at=stop_at)

    def _refuse(self, candidates: Sequence[Candidate], trials: Trials) -> set[str]:
        """Record the candidates that need more host memory than there is, as a trial without processes."""
        name, _ = self.history.next_trial()
        records = refusals(candidates, name, trials.space, trials.records)
        if records:
            trials.add(records, {})
        for record in records:
            self.tell(Note(f"trial {name}: {record.candidate_key} is {record.outcome.sentence}"))
        return {record.candidate_key for record in records}

    def _run_proof(self, decision: Prove) -> None:
        candidate = decision.candidate
        parity = Parity(agrees=True)
        if self.comparisons is not None:
            parity = self.comparisons.of(candidate, self._trials, self.tell)
        if parity.agrees is False:
            outcome = Outcome(kind="crash", moment=PARITY, sentence=parity.sentence)
            name, _ = self.history.next_trial()
            # The same applies to the other micro-batches that were measured.
            fits = [record.candidate_key for record in ranking(self._trials.records)]
            alike = [key for key in fits if same_steps(self.space.by_key[key], candidate)]
            records = [Record(candidate_key=key, trial=name, purpose="proof", outcome=outcome) for key in alike]
            self._trials.add(records, {})
            self.tell(Note(f"{candidate.key} is not the answer: {parity.sentence}."))
        elif not self.cancelled():
            warnings = (parity.sentence,) if parity.sentence else ()
            wanted = Measure(candidate.engine, (candidate,), decision.reason)
            self._has_saved = self._trials.run(
                wanted, proving=True, warnings=warnings, timed=self._seconds_for_timing(candidate)
            )

    def _seconds_for_timing(self, candidate: Candidate) -> float:
        """The most seconds of a proof's timed steps; with a time budget, what remains of it beyond the fewest steps."""
        records = self._trials.records
        if (left := self._time_left(records)) is None:
            return math.inf
        return max(0.0, left.seconds - left.reserve(believe(self.space, records), records, [candidate]))
