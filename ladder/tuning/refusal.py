"""Candidates that do not fit although no measurement says so.

Some are refused before they are tried, because the host would run out of memory: there the kernel kills whom it likes.
Others were lucky: they fit while they were measured, and not in their proof.
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
    """`records` as a strategy may build on them: a proof that failed stands in for the measurement it disproves."""
    failed = disproved(records)
    return [
        replace(failed.get(record.candidate_key, record), purpose=record.purpose)
        for record in records
        if not (record.purpose == "proof" and record.candidate_key in failed)
    ]


def refusals(candidates: Sequence[Candidate], trial: str, space: Space, records: Sequence[Record]) -> list[Record]:
    """A `host_oom` record, in the name of `trial`, for each of `candidates` believed to need more host memory than
    there is. The belief is calibrated by `records`; what is within its error is tried, as ranks are the first processes
    that a kernel without memory kills."""
    belief = believe(space, records)
    most = most_host_bytes(space)
    needs = {candidate: host_bytes(candidate, belief) for candidate in candidates}
    return [_refusal(candidate, needed, trial, space) for candidate, needed in needs.items() if needed > most]


def host_bytes(candidate: Candidate, belief: Belief) -> int:
    """Host memory of all ranks together. Ranks on the CPU device hold everything there, up to their limit."""
    outlook, space = belief.outlook(candidate), belief.space
    return space.on_host(outlook.host, min(outlook.memory.peak, space.memory_limit))


def _refusal(candidate: Candidate, needed: int, trial: str, space: Space) -> Record:
    sentence = (
        f"refused before it was tried: the ranks would need {format_bytes(needed)} of host memory, and "
        f"{format_bytes(space.host_memory)} is what they may use (--host-memory)"
    )
    outcome = Outcome(
        kind="host_oom", moment=REFUSED, sentence=sentence, bytes_asked=needed, bytes_free=space.host_memory
    )
    return Record(candidate_key=candidate.key, trial=trial, purpose="measure", outcome=outcome)
