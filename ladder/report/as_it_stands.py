"""The user's script as its command stands, and how much faster the answer is."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Record
from ladder.report.first_fit import compared as with_the_recipe
from ladder.report.noise import ends, times
from ladder.search.policy import faster_without_deepspeed
from ladder.search.space import Space, as_it_stands, cautions_of, measured, proven, ranking

_AS_FAST = 1.03
"""Speeds that differ by less than this factor count as equal. Chosen: a promise holds within it."""


def compared(space: Space, records: Sequence[Record], best: Record) -> str | None:
    """How `best`, a proof, compares with the script as it stands, or else with the documented recipe, in one sentence.

    The slower one of the proof and its trial counts for a gain, and the faster one for a loss: noise is neither. If the
    script's own way was proven too, its proof counts, and only proofs are compared.
    """
    own = as_it_stands(space, records)
    if own is None:
        return with_the_recipe(space, records, best)
    if not own.tokens_per_second:
        return f"As its command stands, the script does not train here ({own.candidate_key}: {own.outcome.sentence})."
    own_proof = proven(records).get(own.candidate_key)
    trial = None if own_proof is not None else measured(records).get(best.candidate_key)
    where = f"trial {own.trial}" if own_proof is None else "its proof"
    own = own_proof or own
    speeds = [record.tokens_per_second or 0.0 for record in (best, trial) if record is not None]
    own_speed = own.tokens_per_second or 0.0
    least, most = (speed / own_speed for speed in (min(speeds), max(speeds)))
    said = f"{own.candidate_key}: {own_speed:,.0f} tokens/s in {where}"
    if best.candidate_key != own.candidate_key and (unsure := times(ends(best, trial), ends(own))):
        return f"{unsure} your script as its command stands ({said})."
    if best.candidate_key != own.candidate_key and least > _AS_FAST:
        return f"{least:.{1 if least >= 1.1 else 2}f} times as fast as your script as its command stands ({said})."
    if most < 1 / _AS_FAST:
        return f"{1 - most:.0%} slower than your script as its command stands ({said})."
    return f"Nothing found is clearly faster than your script as its command stands ({said})."


def compared_without_deepspeed(space: Space, records: Sequence[Record], best: Record | None) -> str | None:
    """As `compared`, of the answer without DeepSpeed, where that is another than `best` and a script is compared."""
    plain = faster_without_deepspeed(records, space.tolerance)
    if plain is None or plain == best or as_it_stands(space, records) is None:
        return None
    return " ".join(filter(None, (compared(space, records, plain), _with_masters(space, records, plain))))


def _with_masters(space: Space, records: Sequence[Record], plain: Record) -> str:
    """The fastest that fits and keeps fp32 weights, beside an answer that trains 16-bit ones as the script does."""
    if not space.workload.trains_16_bits or not cautions_of(plain, space):
        return ""
    kept = next((each for each in ranking(records) if not cautions_of(each, space)), None)
    if kept is None:
        return "Nothing that keeps an fp32 copy of the weights was tried and fits."
    speed = kept.tokens_per_second or 0.0
    return (
        f"The fastest that keeps an fp32 copy of the weights: {kept.candidate_key}, {speed:,.0f} tokens/s in its trial."
    )
