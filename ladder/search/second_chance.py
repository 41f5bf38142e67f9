"""Tries again where fragmentation may have decided: after a failure in pieces, and after one by a narrow margin."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.belief import SLIM, Belief, Outlook, believe
from ladder.search.decisions import Measure
from ladder.search.space import Space, failed_in_setup, fastest, late_and_in_pieces, measured, ruled_out, same_steps

_NARROW = 0.02
"""Of the limit: who lacked no more may owe it to fragmentation, which differs from candidate to candidate. Derived: the
standard deviation of the allocator's margin before any trial (`MemoryCalibration.margin_deviation`)."""
_ODDS = 0.1
"""The least probability to fit of a candidate that another's narrow failure had ruled out. Chosen: of ten such trials,
one finds what may be much faster than everything else (benchmarks/results/search)."""


def second_chance(space: Space, records: Sequence[Record]) -> Measure | None:
    """A trial of one candidate that is predicted to be faster than the best, and whose failure is not certain.

    As the only candidate of a new trial, its result is then final.
    """
    best = fastest(records)
    speed = (best.tokens_per_second or 0.0) if best is not None else 0.0
    pieces, narrow = _in_pieces(space, records), _beside_narrow_failures(space, records)
    if not pieces and not narrow:
        return None
    belief = believe(space, records)
    if top := _most_hopeful(belief, pieces, speed, SLIM):
        reason = "once more, alone: memory was free but fragmented, after other candidates of its trial"
        return Measure(top.engine, (top,), reason)
    if top := _most_hopeful(belief, narrow, speed * (1 + space.tolerance), _ODDS):
        reason = "it may fit: a smaller micro-batch ran out by so little that fragmentation may have decided"
        return Measure(top.engine, (top,), reason)
    return None


def _most_hopeful(belief: Belief, candidates: Sequence[Candidate], speed: float, least: float) -> Candidate | None:
    """The most promising of `candidates` that fits at least that probably and is expected to exceed `speed`."""

    def promise(outlook: Outlook) -> float:
        return outlook.fits * outlook.speed.tokens_per_second

    outlooks = [belief.outlook(each) for each in candidates]
    hopeful = [each for each in outlooks if each.fits >= least and each.speed.tokens_per_second > speed]
    return max(hopeful, key=promise).candidate if hopeful else None


def _in_pieces(space: Space, records: Sequence[Record]) -> list[Candidate]:
    """Candidates that ran out late in their trial though enough was free."""
    late = [record for record in measured(records).values() if late_and_in_pieces(record, records)]
    candidates = [space.by_key[record.candidate_key] for record in late if record.candidate_key in space.by_key]
    return [each for each in candidates if ruled_out(each, space, records) is None]


def _beside_narrow_failures(space: Space, records: Sequence[Record]) -> list[Candidate]:
    """Untried candidates that only one failure rules out: that of a smaller micro-batch, which lacked very little."""
    tried = measured(records)
    found = []
    for record in tried.values():
        if not _is_narrow(record, space) or record.candidate_key not in space.by_key:
            continue
        failed = space.by_key[record.candidate_key]
        others = [each for each in records if each is not record]
        untried = [each for each in space.candidates if each.key not in tried and same_steps(each, failed)]
        found += [each for each in untried if ruled_out(each, space, others) is None]
    return found


def _is_narrow(record: Record, space: Space) -> bool:
    outcome = record.outcome
    if outcome.kind != "gpu_oom" or failed_in_setup(outcome) or outcome.bytes_asked is None:
        return False
    return 0 < outcome.bytes_asked - (outcome.bytes_free or 0) <= _NARROW * space.memory_limit
