"""The documented recipe's first step that fits, and how much faster the answer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.report.noise import ends, taken, times
from ladder.search.belief import LIKELY, believe
from ladder.search.policy import documented_steps
from ladder.search.space import Space, measured, ruled_out

_AS_FAST = 1.01
"""Speeds that differ by less than this factor count as equal. Chosen."""
_UNCERTAIN = 4.0
"""A prediction whose ends are further apart than this factor is nothing to compare an answer with. Chosen: the first
fit may then be half or twice as fast as predicted."""


@dataclass(frozen=True, kw_only=True)
class FirstFit:
    """The first step of the documented recipe that fits, with the rungs of this tune."""

    candidate: Candidate
    tokens_per_second: float
    low: float
    """It is slower than this with a probability of 10 %; the slowest that was measured if it was."""
    high: float
    """It is faster than this with a probability of 10 %; the fastest that was measured if it was."""
    peak: int
    """Bytes per GPU."""
    trial: str | None
    """The trial that measured it; None for a prediction."""
    earlier_tried: bool
    """Whether trials showed that no earlier step fits; otherwise some are only predicted not to fit."""

    @property
    def figure(self) -> str:
        """Its speed, and whether that is measured or predicted."""
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        if self.trial is None:
            return f"predicted {speed}, {self.low:,.0f} to {self.high:,.0f}"
        return f"{speed} in trial {self.trial}"

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "candidate": self.candidate.key,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "predicted_low": round(self.low, 1) if self.trial is None else None,
            "predicted_high": round(self.high, 1) if self.trial is None else None,
            "measured_in_trial": self.trial,
        }


def first_fit(space: Space, records: Sequence[Record]) -> FirstFit | None:
    """The first fit, measured or predicted; None if no step is likely to fit, or its speed is too uncertain."""
    tried, belief, earlier_tried = measured(records), believe(space, records), True
    for step in documented_steps(space):
        record = tried.get(step.key)
        if record is not None and record.measurement is not None and record.tokens_per_second:
            speed, peak, trial = record.tokens_per_second, record.measurement.peak_device, record.trial
            low, high = ends(record)
        elif record is not None or ruled_out(step, space, records) is not None:
            continue
        elif (outlook := belief.outlook(step)).fits < LIKELY:
            earlier_tried = False
            continue
        else:
            speed, peak, trial = outlook.tokens_per_second, outlook.memory.peak, None
            low, high = outlook.pessimistic, outlook.optimistic
            if high > _UNCERTAIN * low:
                return None
        return FirstFit(
            candidate=step,
            tokens_per_second=speed,
            low=low,
            high=high,
            peak=peak,
            trial=trial,
            earlier_tried=earlier_tried,
        )
    return None


def times_as_fast(found: FirstFit, best: Record, trial: Record | None = None) -> str:
    """The headline: how `best`, a proof, compares with the recipe's first fit.

    The slower one of the proof and its `trial` counts, so that noise does not exaggerate the gain.
    """
    speeds = [record.tokens_per_second or 0.0 for record in (best, trial) if record is not None]
    slower = min(speeds)
    ratio = slower / found.tokens_per_second
    if best.candidate_key == found.candidate.key:
        return "The documented recipe ends on the same configuration"
    unsure = times(ends(best, trial), (found.low, found.high)) if found.trial is not None or taken(best) else None
    if found.trial is None and found.low <= slower <= found.high:
        return "Perhaps as fast as the documented recipe's first fit"
    if unsure is not None:
        return f"{unsure} the documented recipe's first fit"
    if 1 / _AS_FAST < ratio < _AS_FAST:
        return "As fast as the documented recipe's first fit"
    if ratio < 1:
        return f"{1 - ratio:.0%} slower than the documented recipe's first fit"
    said = f"{ratio:.1f} times" if ratio >= 1.1 else f"{ratio:.2f} times"
    return f"{'About ' if found.trial is None else ''}{said} as fast as the documented recipe's first fit"


def compared(space: Space, records: Sequence[Record], best: Record) -> str | None:
    """The headline with its evidence, in one sentence; None if no step of the recipe fits."""
    found = first_fit(space, records)
    if found is None:
        return None
    headline = times_as_fast(found, best, measured(records).get(best.candidate_key))
    if best.candidate_key == found.candidate.key:
        return f"{headline}."
    doubt = "" if found.earlier_tried else "; the steps before it are predicted not to fit"
    return f"{headline} ({found.candidate.key}: {found.figure}{doubt})."
