"""What a time budget still allows: a trial begins only if it can end in time together with the proof that follows it.

Seconds are predicted from the phases of a trial (`cost`), before the first trial already, and corrected by the trials
that this machine has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.auto import ONE_IN_TEN, auto, auto_without, hopeful
from ladder.search.belief import Belief, Outlook, believe
from ladder.search.cost import PROCESSES, candidate_seconds, comparison_seconds, expected_seconds, proof_seconds
from ladder.search.decisions import Measure, Stop, Strategy
from ladder.search.space import Space, fastest, proven
from ladder.units import counted

_KNOWN_BEFORE = 3.0
"""The prediction of trials counts as this many seconds of trials that took as long as predicted. Chosen: the start of
a small model, so that a single trial corrects more than half of an error."""
_MARGIN = 1.1
"""How much longer than predicted trial and proof may take and still end in time. Chosen: with it, none of nine
simulated tunes took longer than 120 or 240 s of budget (benchmarks/results/search)."""
_STAYED = 0.1
"""A trial whose process group takes less ran in ranks that stayed after another. Chosen: new ranks on GPUs need 0.5 to
1.5 s for theirs, and those that stayed less than 0.05 s (measured on H100 and H200; benchmarks/results/runs)."""
_NAMED = 2
"""Engines left untried that a sentence names. Chosen: the first decide whether more time is worth it."""


@dataclass(frozen=True, kw_only=True)
class TimeLeft:
    """How long the tune may still take."""

    seconds: float
    """Until the answer has to be proven and written."""
    comparisons: int = 0
    """Trials that compare losses before a proof."""
    taken: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The seconds of earlier trials, by trial and phase."""

    def pace(self, belief: Belief, records: Sequence[Record]) -> float:
        """How many times as long as predicted this machine's trials have taken.

        Proofs need new processes, so that a trial did without these must not make the machine look fast.
        """
        expected = taken = _KNOWN_BEFORE
        for trial, seconds in self.taken.items():
            own = [each for each in records if each.trial == trial and each.measurement and each.purpose != "proof"]
            if own and seconds:
                space, is_probe = belief.space, own[0].purpose == "probe"
                outlooks = [belief.outlook(space.by_key[each.candidate_key], shallow=is_probe) for each in own]
                spared = PROCESSES if space.device == "cuda" and seconds.get("process_group", 1.0) < _STAYED else 0.0
                expected += expected_seconds(outlooks) - spared
                taken += sum(seconds.values())
        return taken / expected

    def reserve(self, belief: Belief, records: Sequence[Record], candidates: Sequence[Candidate] = ()) -> float:
        """Seconds to keep for the proof after a trial of `candidates`, whichever of them or of those before wins."""
        best, space = fastest(records), belief.space
        winners = [belief.outlook(candidate) for candidate in candidates]
        if best is not None and best.candidate_key not in proven(records):
            winners.append(belief.outlook(space.by_key[best.candidate_key]))
        price = max((self._proof(outlook) for outlook in winners), default=0.0)
        return _MARGIN * self.pace(belief, records) * price

    def allows(self, belief: Belief, records: Sequence[Record], decision: Measure) -> Measure | None:
        """`decision` with as many of its candidates as there is time for, the most promising; None if there is none.

        A probe is allowed only if the trial after it would be; without time for both, the trial alone may be.
        """
        pace = _MARGIN * self.pace(belief, records)
        after = expected_seconds([belief.outlook(decision.candidates[0])]) if decision.probe else 0.0
        ranked = by_promise(belief, decision.candidates)
        for number in range(len(ranked), 0, -1):
            candidates = tuple(each for each in decision.candidates if each in ranked[:number])
            tried = [belief.outlook(candidate, shallow=decision.probe) for candidate in candidates]
            trial = proof_seconds(tried[0])[1] if decision.precise else expected_seconds(tried)
            if pace * (trial + after) + self.reserve(belief, records, candidates) <= self.seconds:
                return replace(decision, candidates=candidates)
        return self.allows(belief, records, replace(decision, probe=False)) if decision.probe else None

    def last_begin(self, belief: Belief, records: Sequence[Record], decision: Measure) -> float:
        """Seconds from now after which the trial of `decision` may begin no further candidate."""
        later = [belief.outlook(candidate, shallow=decision.probe) for candidate in decision.candidates[1:]]
        longest = max(map(candidate_seconds, later), default=0.0)
        pace = _MARGIN * self.pace(belief, records)
        return self.seconds - self.reserve(belief, records, decision.candidates) - pace * longest

    def _proof(self, outlook: Outlook) -> float:
        return proof_seconds(outlook)[0] + self.comparisons * comparison_seconds(outlook)


def by_promise(belief: Belief, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The `candidates` that probably fit and are fastest come first.

    A trial may begin with a slow one that decides about the others; where not all are tried, it is left out first.
    """

    def promise(candidate: Candidate) -> float:
        outlook = belief.outlook(candidate)
        return outlook.fits * outlook.tokens_per_second

    return sorted(candidates, key=promise, reverse=True)


def within(strategy: Strategy, space: Space, records: Sequence[Record], left: TimeLeft) -> Measure | Stop:
    """What `strategy` does next if the answer has to be proven in the time that is `left`.

    The default strategy then tries the best of what there is time for; the others end where they cannot go on.
    """
    belief, late = believe(space, records), set[str]()
    while True:
        decision = auto_without(late, belief, records) if strategy is auto else strategy(space, records)
        if isinstance(decision, Stop):
            return replace(decision, reason=_said(belief, records, left, late), late=True) if late else decision
        if (allowed := left.allows(belief, records, decision)) is not None:
            return allowed
        keys = {candidate.key for candidate in decision.candidates}
        if keys <= late or strategy is not auto:
            return Stop(_said(belief, records, left, keys), late=True)
        late |= keys


def _said(belief: Belief, records: Sequence[Record], left: TimeLeft, late: set[str]) -> str:
    """What the budget leaves untried, and how much faster it might be."""
    best = fastest(records)
    speed = best.tokens_per_second if best is not None else None
    by_engine: dict[str, Outlook] = {}
    for each in sorted(hopeful(belief.space, records, belief), key=lambda each: each.optimistic, reverse=True):
        by_engine.setdefault(each.candidate.engine.key, each)
    tops = list(by_engine.values())
    if not tops:
        return f"no time is left to try {', '.join(sorted(late)[:_NAMED])}"
    named = [_promise(each, speed, left.pace(belief, records)) for each in tops[:_NAMED]]
    more = f" and {counted(len(tops) - _NAMED, 'more engine')}" if len(tops) > _NAMED else ""
    return f"no time is left to try {', '.join(named)}{more}"


def _promise(outlook: Outlook, speed: float | None, pace: float) -> str:
    seconds = pace * expected_seconds([outlook])
    ahead = f"{ONE_IN_TEN} {outlook.optimistic / speed - 1:.0%} above the fastest trial, " if speed else ""
    return f"{outlook.candidate.key} ({ahead}a trial of {seconds:.0f} s)"
