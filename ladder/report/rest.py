"""How long a tune will still take, estimated with the search's own costs of trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.events.outcome import Record
from ladder.events.protocol import TrialSpec
from ladder.search.auto import is_worth_a_trial
from ladder.search.belief import SLIM, Belief, Outlook
from ladder.search.cost import MOST_TRIALS, comparison_seconds, expected_seconds, proof_seconds, usual_seconds
from ladder.search.policy import Stop, proof
from ladder.search.space import fastest, measured, ruled_out


@dataclass(frozen=True)
class Rest:
    """Seconds until the answer is proven."""

    least: float
    """If only the most promising trial is needed."""
    most: float
    """If every engine that may still win is tried, up to five."""
    proof: float = 0.0
    """The part of it for the proof, at least."""
    comparisons: float = 0.0
    """The part of it for trials that compare losses before the proof."""

    def times(self, pace: float) -> Rest:
        """The same on a machine that takes `pace` times as long as expected."""
        return Rest(*(pace * seconds for seconds in (self.least, self.most, self.proof, self.comparisons)))


def rest(belief: Belief, records: Sequence[Record], comparisons: int = 0) -> Rest:
    """Seconds for the rest of the search and for the proof; `belief` must be calibrated by `records`.

    `comparisons` is the number of trials that compare losses before the proof.
    """
    space = belief.space
    best = fastest(records)
    speed = (best.tokens_per_second or 0.0) if best else 0.0
    tried = measured(records)
    rivals: dict[str, Outlook] = {}
    for candidate in space.candidates:
        if candidate.key in tried or ruled_out(candidate, space, records) is not None:
            continue
        outlook = belief.outlook(candidate)
        key = candidate.engine.key
        if outlook.fits < SLIM or (speed and not is_worth_a_trial(outlook, speed, space.tolerance)):
            continue
        if key not in rivals or outlook.optimistic > rivals[key].optimistic:
            rivals[key] = outlook
    seconds = sorted(usual_seconds(outlook) for outlook in rivals.values())
    proven = _to_prove(belief, records, list(rivals.values()))
    if proven is None:
        return Rest(sum(seconds[:1]), sum(seconds[:MOST_TRIALS]))
    least, most = proof_seconds(proven)
    compared = comparisons * comparison_seconds(proven)
    return Rest(sum(seconds[:1]) + compared + least, sum(seconds[:MOST_TRIALS]) + compared + most, least, compared)


def trial_estimate(belief: Belief, spec: TrialSpec) -> float | None:
    """Seconds that the trial of `spec` is expected to take; None if its candidates are not in the space."""
    if spec.parity:  # it has another model and another number of steps
        return None
    by_key = belief.space.by_key
    candidates = [by_key[each.key] for each in spec.candidates if each.key in by_key]
    outlooks = [belief.outlook(candidate, shallow=spec.probe) for candidate in candidates]
    if spec.proof and outlooks:
        return proof_seconds(outlooks[0])[1]
    return expected_seconds(outlooks) if outlooks else None


def _to_prove(belief: Belief, records: Sequence[Record], rivals: Sequence[Outlook]) -> Outlook | None:
    """The candidate that will probably be proven: the fastest so far, or else the slowest of `rivals` to prove."""
    space, best = belief.space, fastest(records)
    if best is not None and best.candidate_key in space.by_key:
        if not rivals and isinstance(proof(space, records), Stop):
            return None
        return belief.outlook(space.by_key[best.candidate_key])
    return max(rivals, key=lambda outlook: proof_seconds(outlook)[1], default=None)
