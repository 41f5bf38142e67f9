"""Proofs that ended by an error of the user's own script: other candidates would meet it too."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Record
from ladder.search.space import PARITY, Space, proven, ranking

_WORDS = {"evaluation": "evaluation", "save": "save", "resume": "resume from its checkpoint"}
"""By moment; at all others the script trains."""


def is_fault(record: Record, space: Space) -> bool:
    """Whether `record` is of such a proof. Its candidate fitted when it was measured."""
    outcome = record.outcome
    has_crashed = record.purpose == "proof" and outcome.kind == "crash" and outcome.moment != PARITY
    return space.workload.script is not None and has_crashed


def last_fault(space: Space, records: Sequence[Record]) -> Record | None:
    """The last of them, if nothing is proven."""
    faults = [record for record in records if is_fault(record, space)]
    return faults[-1] if faults and not proven(records) else None


def is_beyond_doubt(space: Space, records: Sequence[Record]) -> bool:
    """Whether no further proof is worth its time: two failed alike, of two engines where there are two."""
    if (last := last_fault(space, records)) is None:
        return False
    faults = [record for record in records if is_fault(record, space)]
    alike = [record for record in faults if _cause(record) == _cause(last)]
    failed = {space.by_key[record.candidate_key].engine for record in alike}
    left = {space.by_key[record.candidate_key].engine for record in ranking(records)}
    return len(alike) > 1 and (len(failed) > 1 or left <= failed)


def part_of_script(record: Record) -> str:
    """What of the script failed, in words."""
    return _WORDS.get(record.outcome.moment or "", "training")


def _cause(record: Record) -> tuple[str | None, str]:
    """When and why, on whichever rank."""
    return record.outcome.moment, record.outcome.sentence.partition(": ")[2]
