"""How long a tune will still take: what it may yet try, priced as the search prices it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.events.outcome import Record
from ladder.events.protocol import StepPolicy, TrialSpec
from ladder.search.belief import SLIM, Belief, Outlook
from ladder.search.cost import MOST_TRIALS, expected_seconds, start_seconds, usual_seconds
from ladder.search.policy import Stop, proof
from ladder.search.space import fastest, measured, ruled_out

PROOF_SECONDS = 30.0
"""A proof is timed for at most so long, unless few steps take longer; `tuning.trial_request` asks for it."""
_PROOF_STEPS = 3
"""And for so many optimizer steps at least."""
_WARM_UP = 2
"""Untimed optimizer steps of a first candidate, as `StepPolicy.warmup` says."""
_COMPARED_LAYERS, _COMPARED_STEPS = 2, 4
"""Of the model whose losses are compared (`tuning.parity`)."""
_COMPARED_AGAINST = "zero1"


@dataclass(frozen=True)
class Rest:
    """Seconds until the answer is proven."""

    least: float
    """If the most promising trial settles it."""
    most: float
    """If every engine that may still win is tried, up to five."""
    proof: float = 0.0
    """Of these, what the proof takes at least."""
    comparisons: float = 0.0
    """And what the trials take that compare losses before it."""

    def times(self, pace: float) -> Rest:
        """The same on a machine that takes `pace` times as long as expected."""
        return Rest(*(pace * seconds for seconds in (self.least, self.most, self.proof, self.comparisons)))


def rest(belief: Belief, records: Sequence[Record], comparisons: int = 0) -> Rest:
    """What is left of the search, and what ends it, in seconds; `belief` is what `records` say.

    `comparisons` of losses, each a trial of a few layers, come before the proof.
    """
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
    proven = _to_prove(belief, records, list(rivals.values()))
    if proven is None:
        return Rest(sum(seconds[:1]), sum(seconds[:MOST_TRIALS]))
    least, most = _proof_seconds(proven)
    compared = comparisons * _comparison_seconds(proven)
    return Rest(sum(seconds[:1]) + compared + least, sum(seconds[:MOST_TRIALS]) + compared + most, least, compared)


def trial_estimate(belief: Belief, spec: TrialSpec) -> float | None:
    """Seconds that the trial of `spec` is expected to take; None for what is not in the space."""
    if spec.parity:  # its model is another, and so is the number of its steps
        return None
    by_key = belief.space.by_key
    candidates = [by_key[each.key] for each in spec.candidates if each.key in by_key]
    outlooks = [belief.outlook(candidate, shallow=spec.probe) for candidate in candidates]
    if spec.proof and outlooks:
        return _proof_seconds(outlooks[0])[1]
    return expected_seconds(outlooks) if outlooks else None


def _to_prove(belief: Belief, records: Sequence[Record], rivals: Sequence[Outlook]) -> Outlook | None:
    """What will be proven, as far as that is known: the fastest so far, else the slowest of `rivals` to prove."""
    space, best = belief.space, fastest(records)
    if best is not None and best.candidate_key in space.by_key:
        if not rivals and isinstance(proof(space, records), Stop):
            return None
        return belief.outlook(space.by_key[best.candidate_key])
    return max(rivals, key=lambda outlook: _proof_seconds(outlook)[1], default=None)


def _proof_seconds(outlook: Outlook) -> tuple[float, float]:
    """At least and at most: it starts anew, is timed until its speed is known well, and evaluates once."""
    step = outlook.speed.step_seconds(min(2, outlook.candidate.accumulation))
    start = start_seconds(outlook.candidate.engine.rung, outlook.workload.model.num_parameters)
    fewest = _PROOF_STEPS * step
    around = start + (_WARM_UP + 1) * step
    return around + fewest, around + max(fewest, min(StepPolicy().maximum * step, PROOF_SECONDS + step))


def _comparison_seconds(outlook: Outlook) -> float:
    """One trial of a few layers; none where the candidate is what others are compared with."""
    candidate, model = outlook.candidate, outlook.workload.model
    if candidate.engine.name == _COMPARED_AGAINST and candidate.checkpoint_every == 0:
        return 0.0
    share = min(1.0, _COMPARED_LAYERS / model.num_layers)
    step = outlook.speed.step_seconds(min(2, candidate.accumulation)) * share
    return start_seconds(candidate.engine.rung, int(model.num_parameters * share)) + _COMPARED_STEPS * step
