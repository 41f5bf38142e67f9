"""What a rank is told of a candidate, and how many of its optimizer steps it times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CandidateSpec:
    """What a rank needs to know about a candidate."""

    key: str
    checkpoint_every: int
    micro_batch: int
    accumulation: int
    offload_activations: bool = False
    beat_step_seconds: float | None = None
    """Seconds of an optimizer step, with the real accumulation, that would equal the best candidate so far."""
    first_within: float | None = None
    """Skip it if the trial's first candidate took more seconds than this for an optimizer step."""

    def step_seconds(self, accumulate: float | None, boundary: float) -> float:
        """Seconds of an optimizer step, from the seconds of micro-steps without and with the optimizer."""
        return boundary + (self.accumulation - 1) * (accumulate or 0.0)

    def loses(self, seconds: float, margin: float) -> bool:
        """Whether an optimizer step of `seconds`, made faster by `margin`, is still slower than the best so far."""
        return self.beat_step_seconds is not None and seconds * (1 - margin) > self.beat_step_seconds

    def is_left_out(self, first_seconds: float) -> bool:
        """Whether it is skipped because the first candidate took `first_seconds` for an optimizer step."""
        return self.first_within is not None and first_seconds > self.first_within


@dataclass(frozen=True, kw_only=True)
class StepPolicy:
    """How many optimizer steps a candidate is timed for."""

    warmup: int = 1
    """Untimed optimizer steps; an engine's first candidate, whose first step creates Adam's states, has one more."""
    long_seconds: float = 3.0
    """But not in a proof, if the first step takes this long. Chosen: the step after the one that created the states was
    5 % longer than the next (measured: 3.4 and 3.2 s on two H100), which the median of a proof's three steps hides."""
    minimum: int = 2
    """The fewest steps of a candidate that may win, however long they take: a single one may be disturbed."""
    maximum: int = 12
    target_spread: float = 0.01
    """Timing stops once the uncertainty of the median is below this fraction."""
    seconds: float = 4.0
    """Timing stops after this time, as long steps vary little."""
    disagreement: float = 0.04
    """But if there are only two steps, and one is longer by more than this fraction, a third one is timed."""
    loser_margin: float = 0.10
    """Timing stops if even the fastest step, made faster by this fraction, is slower than the best candidate so far.
    But not while a step takes less than the one before by about this fraction, for `seconds` at most: where the driver
    maps memory slowly, the first steps took twice as long as later ones (measured: FSDP2 on two H200;
    benchmarks/results/runs)."""
    loser_seconds: float = 0.5
    """But not before this time: short steps wait for the host, the first ones most."""
    sustained_seconds: float = 0.0
    """A timed step accumulates at least this long before the micro-step with the optimizer, if the training's do."""
    hopeless_margin: float = 0.75
    """Like `loser_margin`, for an untimed step, which is slow because of first allocations: no more of them follow."""

    def micro_steps(self, candidate: CandidateSpec, fewest: int, seconds: float | None) -> int:
        """How often a timed step of `candidate` accumulates, if a micro-step takes so many `seconds`; or `fewest`."""
        if not seconds:
            return fewest
        return max(fewest, min(candidate.accumulation, 1 + math.ceil(self.sustained_seconds / seconds)))

    def is_enough(
        self, candidate: CandidateSpec, steps: Sequence[float], before: float, timed: float, elapsed: float
    ) -> bool:
        """Whether no further step is needed after `steps`, which are the seconds of the steps timed in `timed` seconds.

        `before` is the time of the untimed step before them: one long step is enough if it agrees with that. `elapsed`
        is the time since that step began.
        """
        loses = timed >= self.loser_seconds and candidate.loses(min(steps), self.loser_margin)
        if len(steps) >= self.maximum or (loses and (self._has_settled(before, *steps) or elapsed > self.seconds)):
            return True
        pair = (before, *steps) if len(steps) == 1 else tuple(steps)
        if len(pair) < self.minimum:
            return False
        disagree = len(pair) == 2 and max(pair) > (1 + self.disagreement) * min(pair)
        # A soak test never stops for precision, and computing the spread of thousands of steps would take too long.
        can_be_precise = len(steps) > 1 and self.target_spread > 0
        is_precise = can_be_precise and relative_spread(steps) / math.sqrt(len(steps)) < self.target_spread
        return is_precise or (elapsed > self.seconds and not disagree)

    def _has_settled(self, *steps: float) -> bool:
        """Whether the last of `steps` is not much shorter than the one before; one that is infinite was not timed."""
        return math.isinf(steps[-2]) or steps[-2] <= (1 + self.loser_margin) * steps[-1]


def relative_spread(seconds: Sequence[float]) -> float:
    """Half the interquartile range, divided by the median; 0 for a single value."""
    if len(seconds) < 2:
        return 0.0
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / 2 / median
