"""Whether to prove a candidate while the search goes on: whoever ends it early then has a proven answer."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Record
from ladder.search.auto import auto, hopeful
from ladder.search.belief import LIKELY, believe
from ladder.search.cost import comparison_seconds, proof_seconds
from ladder.search.decisions import Prove
from ladder.search.rehearsal import Rehearsal
from ladder.search.space import Space, fastest, proven

_NEAR = 0.1
"""A first answer may be this much slower than what the search will probably find. Chosen: a training can begin with it,
and the proof of a slower one would only delay the better one's."""
_LONGER = 2.0
"""How many times as long as the proof the rest of the search takes at least. Chosen: another winner costs another
proof, so a tune whose search is nearly over proves only once."""


def first_proof(space: Space, records: Sequence[Record], *, comparisons: int) -> Prove | None:
    """The fastest candidate so far, if it is to be proven before the search goes on; None if not.

    `comparisons` is the number of trials that compare losses before a proof.
    """
    best = fastest(records)
    if best is None or best.candidate_key not in space.by_key or proven(records):
        return None
    belief = believe(space, records)
    outlook = belief.outlook(space.by_key[best.candidate_key])
    speed = best.tokens_per_second or 0.0
    left = [each for each in hopeful(space, records, belief) if each.fits >= LIKELY]
    if any(each.tokens_per_second > (1 + _NEAR) * speed for each in left):
        return None
    enough = _LONGER * (proof_seconds(outlook)[1] + comparisons * comparison_seconds(outlook))
    rehearsal = Rehearsal(belief, list(records))
    rehearsal.search(space, auto, most=enough)
    if rehearsal.seconds < enough:
        return None
    return Prove(outlook.candidate, "a first answer, before the search for a faster one goes on")
