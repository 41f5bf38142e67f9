"""Rehearses a search on paper, to say before it begins how long it will take.

The models' own prediction before any trial is taken for the truth. The strategy then decides as it will in the tune,
and the costs of its trials and of the proof are added up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ladder.candidates import Candidate
from ladder.events.outcome import Measurement, Outcome, Purpose, Record
from ladder.search.auto import auto
from ladder.search.belief import LIKELY, SLIM, Belief, Outlook, believe
from ladder.search.cost import candidate_seconds, comparison_seconds, proof_seconds, short_step, start_of
from ladder.search.decisions import Measure, Stop, Strategy
from ladder.search.memory import MemoryCalibration
from ladder.search.policy import Prove, proof
from ladder.search.space import REFUSED, Space, fastest, of_main_backend, proven
from ladder.units import counted

_MOST_TRIALS = 40
"""Chosen: several times what the default strategy needs. A longer search is priced by these trials."""
_A_MINUTE_AND_A_HALF = 90.0
"""Below this, seconds are said in place of minutes. Chosen: one minute or two would be too coarse."""
_LOSER_MARGIN = 0.1
"""Derived: `StepPolicy.loser_margin`."""
_STEPS_OF_A_LOSER = 0.75
"""Of what a candidate costs, if it is slower than the best. Derived: it is timed for one step instead of two."""
_UNFORESEEN = 1.26
"""How many times as long tunes took as was rehearsed, where what is predicted is all that happens. Measured: the median
of 33 stored tunes on GPUs (benchmarks/price_said.py)."""
_OUTSIDE = 1 << 30
"""Bytes outside PyTorch in a rehearsed trial. Chosen: they change no decision, as the prior has their total."""


@dataclass(frozen=True)
class Price:
    """How long a tune is expected to take."""

    seconds: float
    trials: int
    """Probes included, the proof and the comparisons of losses not."""

    def sentence(self) -> str:
        """In words, such as "about 4 minutes: 5 trials and the proof"."""
        return f"about {in_words(self.seconds)}: {counted(self.trials, 'trial')} and the proof"


def price(space: Space, strategy: Strategy, *, comparisons: int = 0) -> Price | None:
    """The usual price of a tune; None if nothing is likely to fit. The same for the same arguments.

    DeepSpeed's engines come first and then all, as in `ladder.tuning.run`. `comparisons` is the number of trials
    that compare losses before the proof.
    """
    truth = believe(space, ())
    rehearsal = Rehearsal(truth)
    own = of_main_backend(space)
    for part in [own, space] if own.engines and own.engines != space.engines else [space]:
        rehearsal.search(_in_play(part, truth) if strategy is auto else part, strategy)
        rehearsal.prove(part, comparisons)
    if not proven(rehearsal.records):
        return None
    return Price(_UNFORESEEN * rehearsal.seconds, round(_UNFORESEEN * rehearsal.num_trials))


def _in_play(space: Space, truth: Belief) -> Space:
    """`space` without engines that the default strategy will not try: it leaves out what seems slower than the best."""
    outlooks = [truth.outlook(each) for each in space.candidates]
    best = max((each.tokens_per_second for each in outlooks if each.fits >= LIKELY), default=0.0)
    hopeful = {each.candidate.engine for each in outlooks if each.fits >= SLIM and each.optimistic >= best}
    return replace(space, engines=tuple(engine for engine in space.engines if engine in hopeful) or space.engines)


def in_words(seconds: float) -> str:
    """A duration that is known to about a third: "40 seconds", "4 minutes"."""
    if seconds < _A_MINUTE_AND_A_HALF:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    return counted(round(seconds / 60), "minute")


@dataclass
class Rehearsal:
    """One tune on paper."""

    truth: Belief
    records: list[Record] = field(default_factory=list)
    num_trials: int = 0
    seconds: float = field(default=0.0)

    def search(self, space: Space, strategy: Strategy, *, most: float = math.inf) -> None:
        """Try what `strategy` asks for until it stops, or has taken at least `most` seconds."""
        while self.num_trials < _MOST_TRIALS and self.seconds < most:
            decision = strategy(space, self.records)
            if isinstance(decision, Stop):
                return
            self.num_trials += 1
            self._measure(decision)

    def prove(self, space: Space, comparisons: int) -> None:
        """Prove the winner, after as many comparisons of losses."""
        decision = proof(space, self.records)
        if isinstance(decision, Prove):
            outlook = self.truth.outlook(decision.candidate)
            self.seconds += proof_seconds(outlook)[0] + comparisons * comparison_seconds(outlook)
            self.records.append(_record(decision.candidate, "proof", "proof", Outcome(kind="fits"), outlook))

    def _measure(self, decision: Measure) -> None:
        outlooks = [self.truth.outlook(each, shallow=decision.probe) for each in decision.candidates]
        first = outlooks[0]
        first_step = 0.0
        for outlook in outlooks:
            candidate = outlook.candidate
            if first_step > decision.first_within.get(candidate.key, math.inf):
                continue
            failed = self._failure(outlook, decision)
            if failed is not None and failed.moment == REFUSED:
                self._note(decision, candidate, failed)
                continue
            if outlook is first:
                self.seconds += start_of(candidate, outlook.workload)
            if failed is not None:
                self._note(decision, candidate, failed)
                break
            self.seconds += self._steps(outlook, is_first=not first_step)
            self._note(decision, candidate, Outcome(kind="fits"), outlook)
            first_step = first_step or outlook.speed.step_seconds(candidate.accumulation)

    def _steps(self, outlook: Outlook, *, is_first: bool) -> float:
        best, speed = fastest(self.records), outlook.speed.tokens_per_second
        loses = best is not None and speed < (1 - _LOSER_MARGIN) * (best.tokens_per_second or 0.0)
        seconds = candidate_seconds(outlook)
        more = short_step(outlook) if is_first else 0.0
        return more + seconds * (_STEPS_OF_A_LOSER if loses and not outlook.shallow else 1.0)

    def _failure(self, outlook: Outlook, decision: Measure) -> Outcome | None:
        """Why a candidate does not fit; None if it does. A probe always fits."""
        space, memory = self.truth.space, outlook.memory
        if decision.probe:
            return None
        if memory.host > space.host_memory:
            return Outcome(kind="host_oom", moment=REFUSED, sentence="too little host memory")
        over = memory.peak - space.memory_limit
        if over <= 0:
            return None
        return Outcome(
            kind="gpu_oom", moment="backward", sentence="too little memory", bytes_asked=2 * over, bytes_free=over
        )

    def _note(self, decision: Measure, candidate: Candidate, outcome: Outcome, seen: Outlook | None = None) -> None:
        purpose: Purpose = "probe" if decision.probe else "measure"
        self.records.append(_record(candidate, f"rehearsed {self.num_trials}", purpose, outcome, seen))


def _record(candidate: Candidate, trial: str, purpose: Purpose, outcome: Outcome, seen: Outlook | None) -> Record:
    return Record(
        candidate_key=candidate.key,
        trial=trial,
        purpose=purpose,
        outcome=outcome,
        measurement=None if seen is None else _measured(seen),
        tokens_per_second=None if seen is None or purpose == "probe" else seen.speed.tokens_per_second,
    )


def _measured(outlook: Outlook) -> Measurement:
    memory, several = outlook.memory, outlook.candidate.accumulation > 1
    reserved = max(0, memory.peak - _OUTSIDE)
    return Measurement(
        accumulate_seconds=outlook.speed.accumulate_seconds if several else None,
        boundary_seconds=outlook.speed.boundary_seconds,
        spread=0.005,
        num_steps=3,
        peak_allocated=int(reserved / (1 + MemoryCalibration().margin)),
        peak_reserved=reserved,
        peak_device=memory.peak,
        outside_torch=memory.peak - reserved,
        peak_host=memory.host,
    )
