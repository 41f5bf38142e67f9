"""Candidates that count as not fitting although no measurement says so.

Some are skipped because the host would run out of memory, and the kernel may then kill any process. Others fitted when
they were measured, but not in their proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.candidates import Candidate
from ladder.events.outcome import Outcome, Record
from ladder.search.belief import Belief, believe
from ladder.search.relevance import most_host_bytes
from ladder.search.space import REFUSED, Space, disproved
from ladder.units import format_bytes


def less_disproved(records: Sequence[Record]) -> list[Record]:
    """`records` for a strategy: a failed proof replaces the measurement that it disproves."""
    failed = disproved(records)
    return [
        replace(failed.get(record.candidate_key, record), purpose=record.purpose)
        for record in records
        if not (record.purpose == "proof" and record.candidate_key in failed)
    ]


def refusals(candidates: Sequence[Candidate], trial: str, space: Space, records: Sequence[Record]) -> list[Record]:
    """A `host_oom` record under the name `trial` for each of `candidates` that is predicted to need more host memory
    than there is. The prediction is calibrated by `records`. Candidates within its error are tried: if host memory
    runs out, the kernel kills ranks first."""
    belief = believe(space, records)
    most = most_host_bytes(space)
    needs = {candidate: host_bytes(candidate, belief) for candidate in candidates}
    return [_refusal(candidate, needed, trial, space) for candidate, needed in needs.items() if needed > most]


def host_bytes(candidate: Candidate, belief: Belief) -> int:
    """Predicted host memory of all ranks together. CPU ranks have everything in host memory, up to their limit."""
    outlook, space = belief.outlook(candidate), belief.space
    return space.on_host(outlook.host, min(outlook.memory.peak, space.memory_limit))


def _refusal(candidate: Candidate, needed: int, trial: str, space: Space) -> Record:
    sentence = (
        f"refused without a trial: the ranks would need {format_bytes(needed)} of host memory, and they may use "
        f"{format_bytes(space.host_memory)} (--host-memory)"
    )
    outcome = Outcome(
        kind="host_oom", moment=REFUSED, sentence=sentence, bytes_asked=needed, bytes_free=space.host_memory
    )
    return Record(candidate_key=candidate.key, trial=trial, purpose="measure", outcome=outcome)
