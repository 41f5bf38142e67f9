"""Repeats a trial that failed because of fragmentation, which earlier candidates of the same trial may have caused."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Record
from ladder.search.belief import SLIM, believe
from ladder.search.decisions import Measure
from ladder.search.space import Space, fastest, late_and_in_pieces, measured, ruled_out


def second_chance(space: Space, records: Sequence[Record]) -> Measure | None:
    """A trial of one candidate that ran out because of fragmentation, if it is predicted to be faster than the best.

    As the only candidate of a new trial, its result is then final.
    """
    late = [record for record in measured(records).values() if late_and_in_pieces(record, records)]
    candidates = [space.by_key[record.candidate_key] for record in late if record.candidate_key in space.by_key]
    if not candidates:
        return None
    best = fastest(records)
    speed = (best.tokens_per_second or 0.0) if best is not None else 0.0
    belief = believe(space, records)
    outlooks = [belief.outlook(each) for each in candidates if ruled_out(each, space, records) is None]
    hopeful = [each for each in outlooks if each.fits >= SLIM and each.speed.tokens_per_second > speed]
    if not hopeful:
        return None
    top = max(hopeful, key=lambda each: each.fits * each.speed.tokens_per_second)
    reason = "once more, alone: memory was free but fragmented, after other candidates of its trial"
    return Measure(top.candidate.engine, (top.candidate,), reason)
