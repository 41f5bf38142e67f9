"""Pruning checked: a share of what was ruled out unmeasured is measured anyway, and how often that was wrong."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.belief import SLIM, Belief, believe
from ladder.search.space import Space, failed_in_setup, measured, ruled_out


@dataclass(frozen=True)
class AuditReport:
    """How many pruned candidates were measured all the same, and which of them fit."""

    num_audited: int
    wrongly_pruned: tuple[str, ...]

    def sentence(self) -> str:
        """The false-prune rate in words."""
        if not self.num_audited:
            return "no pruned candidate was measured (--audit)"
        return f"{len(self.wrongly_pruned)} of {self.num_audited} pruned candidates fit when measured anyway"


def to_audit(space: Space, records: Sequence[Record], belief: Belief) -> Candidate | None:
    """The next pruned candidate to measure; None when the share is done. An engine that did not start is left alone."""
    tried = measured(records)
    for candidate in space.candidates:
        if candidate.key not in tried and _drawn(candidate, space) and _pruned(candidate, space, records, belief):
            return candidate
    return None


def audit_report(space: Space, records: Sequence[Record]) -> AuditReport:
    """What the audit of this history found: each candidate is judged by what was known before its own trial."""
    audited, wrong = 0, []
    for key, record in measured(records).items():
        candidate = space.by_key.get(key)
        if candidate is None or not _drawn(candidate, space):
            continue
        before = [earlier for earlier in records if earlier.trial < record.trial]
        if _pruned(candidate, space, before, believe(space, before)):
            audited += 1
            if record.outcome.kind == "fits":
                wrong.append(key)
    return AuditReport(audited, tuple(wrong))


def _drawn(candidate: Candidate, space: Space) -> bool:
    """The same candidates are drawn every time the history is looked at."""
    return zlib.crc32(candidate.key.encode()) < space.audit * (1 << 32)


def _pruned(candidate: Candidate, space: Space, records: Sequence[Record], belief: Belief) -> bool:
    verdict = ruled_out(candidate, space, records)
    if verdict is not None:
        return not failed_in_setup(verdict.record.outcome)
    return bool(records) and belief.outlook(candidate).fits < SLIM
