"""The Pareto front: the candidates that fit for which no other is both faster and needs less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.events.outcome import Record
from ladder.search.space import ranking
from ladder.units import GIB


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A candidate of the front, and its gain over the one before it."""

    key: str
    peak: int
    """Bytes of the rank that uses most."""
    tokens_per_second: float
    per_gib: float | None
    """Tokens/s gained per additional GiB; None for the first."""


def front(records: Sequence[Record]) -> list[Improvement]:
    """The front in ascending measured memory, so that the last candidate is the fastest."""
    fitting = [(record, record.measurement) for record in ranking(records) if record.measurement is not None]
    steps: list[Improvement] = []
    for record, seen in sorted(fitting, key=lambda pair: (pair[1].peak_device, -(pair[0].tokens_per_second or 0.0))):
        speed, last = record.tokens_per_second or 0.0, steps[-1] if steps else None
        if last is not None and speed <= last.tokens_per_second:
            continue
        more = (seen.peak_device - last.peak) / GIB if last is not None else 0.0
        gain = (speed - last.tokens_per_second) / more if last is not None and more > 0 else None
        steps.append(
            Improvement(key=record.candidate_key, peak=seen.peak_device, tokens_per_second=speed, per_gib=gain)
        )
    return steps
