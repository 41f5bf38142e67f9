"""How sure the speeds of a tune are: whether something else used the machine, and what a claim may then say."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Record
from ladder.search.space import Space, measured, ranking
from ladder.units import counted

_SURE = 1.1
"""A comparison whose ends differ by less than this factor is told as one figure. Chosen."""
_MOST_NAMED = 3
"""Engines that are named as not told apart. Chosen."""


def taken(record: Record) -> float:
    """Of the time of the ranks' cores or of a GPU, what other programs took, if that is worth a word."""
    return record.measurement.disturbance if record.measurement is not None else 0.0


def busy_sentence(records: Sequence[Record]) -> str:
    """That something else used the machine during trials; empty if nothing did."""
    timed = [record.measurement for record in records if record.measurement is not None]
    busy = [seen for seen in timed if seen.disturbance]
    if not busy:
        return ""
    low, high = (f"{end(seen.disturbance for seen in busy):.0%}" for end in (min, max))
    what = " and ".join(sorted({seen.disturbed for seen in busy}))
    return (
        f"This machine was busy: in {len(busy)} of {counted(len(timed), 'measurement')}, other programs took "
        f"{low if low == high else f'{low} to {high}'} of {what}. Speeds are those beside them, and "
        "comparisons are ranges; tune again when the machine is idle."
    )


def ends(record: Record, trial: Record | None = None) -> tuple[float, float]:
    """The slowest and the fastest, in tokens/s, that `record` and a `trial` of the same candidate may stand for.

    These are the windows of their steps, and the speed if the ranks had the machine for themselves.
    """
    found: list[float] = []
    for each in filter(None, (record, trial)):
        speed, seen = each.tokens_per_second or 0.0, each.measurement
        found += [speed, speed / (1 - taken(each))]
        found += [speed * window for window in (seen.window_speeds if seen is not None else ())]
    return min(found), max(found)


def times(best: tuple[float, float], other: tuple[float, float]) -> str | None:
    """How many times as fast the first is, as a range; None where one figure says it."""
    low, high = best[0] / other[1], best[1] / other[0]
    if high < _SURE * low:
        return None
    return (
        f"{low:.1f} to {high:.1f} times as fast as" if low > 1 or high < 1 else "As far as can be told here, as fast as"
    )


def not_told_apart(space: Space, records: Sequence[Record], best: Record) -> str:
    """The engines whose trials may have been as fast as `best` had the machine been idle; empty where it was."""
    trials = measured(records)
    low, _ = ends(best, trials.get(best.candidate_key))
    own, near = space.by_key[best.candidate_key].engine, list[str]()
    for record in ranking(records):
        engine = space.by_key[record.candidate_key].engine
        is_near = (taken(record) or taken(best)) and ends(record)[1] >= low
        if is_near and engine != own and engine.key not in near:
            near.append(engine.key)
    if not near:
        return ""
    others = ", ".join(near[:_MOST_NAMED]) + (f" and {len(near) - _MOST_NAMED} more" if len(near) > _MOST_NAMED else "")
    return f"On this busy machine, {own.key} cannot be told apart from {others}."
