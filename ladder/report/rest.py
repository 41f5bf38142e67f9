"""How long a tune will still take: what it may yet try, priced as the search prices it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.events.outcome import Record
from ladder.events.protocol import TrialSpec
from ladder.search.belief import SLIM, Belief, Outlook
from ladder.search.cost import MOST_TRIALS, expected_seconds, usual_seconds
from ladder.search.policy import Stop, proof
from ladder.search.space import fastest, measured, ruled_out


@dataclass(frozen=True)
class Rest:
    """Seconds until the answer is proven."""

    least: float
    """If the most promising trial settles it."""
    most: float
    """If every engine that may still win is tried, up to five."""

    def times(self, pace: float) -> Rest:
        """The same on a machine that takes `pace` times as long as expected."""
        return Rest(self.least * pace, self.most * pace)


def rest(belief: Belief, records: Sequence[Record]) -> Rest:
    """What is left of the search, and the proof that ends it, in seconds; `belief` is what `records` say."""
    space = belief.space
    best = fastest(records)
    bar = (best.tokens_per_second or 0.0) * (1 + space.tolerance) if best else 0.0
    tried = measured(records)
    rivals: dict[str, Outlook] = {}
    for candidate in space.candidates:
        if candidate.key in tried or ruled_out(candidate, space, records) is not None:
            continue
        outlook = belief.outlook(candidate)
        key = candidate.engine.key
        if outlook.optimistic <= bar or outlook.fits < SLIM:
            continue
        if key not in rivals or outlook.optimistic > rivals[key].optimistic:
            rivals[key] = outlook
    seconds = sorted(usual_seconds(outlook) for outlook in rivals.values())
    last = _proof_seconds(belief, records, list(rivals.values()))
    return Rest(sum(seconds[:1]) + last, sum(seconds[:MOST_TRIALS]) + last)


def trial_estimate(belief: Belief, spec: TrialSpec) -> float | None:
    """Seconds that the trial of `spec` is expected to take; None for what is not in the space."""
    if spec.parity:  # its model is another, and so is the number of its steps
        return None
    by_key = belief.space.by_key
    candidates = [by_key[each.key] for each in spec.candidates if each.key in by_key]
    outlooks = [belief.outlook(candidate, shallow=spec.probe) for candidate in candidates]
    return expected_seconds(outlooks) if outlooks else None


def _proof_seconds(belief: Belief, records: Sequence[Record], rivals: Sequence[Outlook]) -> float:
    """The proof runs one candidate with an evaluation pass on top; none is left once the fastest is proven."""
    space, best = belief.space, fastest(records)
    if best is not None and best.candidate_key in space.by_key:
        if not rivals and isinstance(proof(space, records), Stop):
            return 0.0
        return usual_seconds(belief.outlook(space.by_key[best.candidate_key]), 1)
    return max((usual_seconds(outlook, 1) for outlook in rivals), default=0.0)
