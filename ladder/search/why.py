"""Why a rung is not the answer: one sentence with the figures and the trial that decided it."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import MEMORY_OUTCOMES
from ladder.search.belief import LIKELY
from ladder.search.ledger import Entry
from ladder.search.space import Space
from ladder.techniques.keys import beside_name
from ladder.units import format_bytes


def why_not(rung: str, entries: Sequence[Entry], space: Space) -> str:
    """One sentence about `rung`, from the ledger. ValueError if it was not part of the tune."""
    own = [entry for entry in entries if entry.rung == rung]
    if not own:
        raise ValueError(f"{rung} was not part of this tune")
    if own[0].status == "unsupported":
        return f"{rung} cannot work here: {own[0].why}."
    answer = next((entry for entry in entries if entry.status == "answer"), None)
    if answer in own:
        proof = f", and {answer.proof.tokens_per_second:,.0f} in its proof" if answer.proof else ""
        return f"{rung} is the answer: {_name(answer)} reached {_speed(answer):,.0f} tokens/s in its trial{proof}."
    fits = [entry for entry in entries if _fits(entry)]
    best = answer or max(fits, key=_speed, default=own[0])
    fitting = [entry for entry in own if entry in fits]
    if fitting:
        top = max(fitting, key=_speed)
        sentence = (
            f"{rung} fits, but its fastest measured candidate, {_variant(top)}, reached {_speed(top):,.0f} tokens/s"
        )
        sentence += f" (trial {top.record.trial})" if top.record else ""
        if best is top:
            return f"{rung} is the best so far: {sentence}."
        if _speed(top) >= _speed(best):
            return f"{sentence}, {top.why}."
        return f"{sentence}, {1 - _speed(top) / _speed(best):.1%} less than {_name(best)} with {_speed(best):,.0f}."
    return _not_fitting(rung, own, best, space)


def _not_fitting(rung: str, own: Sequence[Entry], best: Entry, space: Space) -> str:
    """The sentence for a rung of which no candidate was measured to fit."""
    failed = [entry for entry in own if entry.record is not None]
    predicted = [entry for entry in own if entry.predicted is not None]
    likely = [entry for entry in predicted if entry.predicted and entry.predicted.fits >= LIKELY]
    if failed and not likely:
        first = failed[0]
        trial = first.record.trial if first.record else ""
        if first.disproved:
            return f"{rung} is not the answer: {_variant(first)} fitted in trial {trial}, and {first.why}."
        is_of_memory = first.record is not None and first.record.outcome.kind in MEMORY_OUTCOMES
        said = "does not fit" if is_of_memory else "failed"
        return f"{rung} {said}: {_variant(first)} ended in trial {trial}, {first.why}."
    if not predicted:
        return f"{rung} was not tried: {own[0].why}."
    if not likely:
        least = min(predicted, key=lambda entry: entry.predicted.peak if entry.predicted else 0)
        assert least.predicted is not None
        needed = f"{format_bytes(least.predicted.peak)} of {format_bytes(space.memory_limit)} per device"
        if least.predicted.peak <= space.memory_limit:
            needed = f"{format_bytes(least.predicted.host)} of {format_bytes(space.host_memory)} of host memory"
        return f"{rung} was not tried: even {_variant(least)}, which needs least memory, is predicted to need {needed}."
    top = max(likely, key=lambda entry: entry.predicted.high if entry.predicted else 0)
    assert top.predicted is not None
    probe = top.predicted.probe
    tried = "has no candidate so far that is known to fit" if failed else "was not tried"
    if probe:
        tried = f"was only probed, with a few of the model's layers (trial {probe})"
    sentence = (
        f"{rung} {tried}: its most promising candidate, {_variant(top)}, is predicted to reach "
        f"{top.predicted.tokens_per_second:,.0f} tokens/s, at most {top.predicted.high:,.0f}"
    )
    return f"{sentence}, where {_name(best)} reached {_speed(best):,.0f}." if _speed(best) else f"{sentence}."


def _fits(entry: Entry) -> bool:
    return entry.record is not None and entry.record.outcome.kind == "fits" and not entry.disproved


def _speed(entry: Entry) -> float:
    return (entry.record.tokens_per_second or 0.0) if entry.record else 0.0


def _name(entry: Entry) -> str:
    return entry.candidate_key or entry.rung


def _variant(entry: Entry) -> str:
    return beside_name(entry.candidate_key) if entry.candidate_key else ""
