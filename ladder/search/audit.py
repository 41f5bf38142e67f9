"""The audit of pruning: measures a share of the pruned candidates anyway, to see how often pruning was wrong."""

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
    """How many pruned candidates were measured anyway, and which of them fit."""

    num_audited: int
    wrongly_pruned: tuple[str, ...]

    def sentence(self) -> str:
        """The false-prune rate in words."""
        if not self.num_audited:
            return "no pruned candidate was measured (--audit)"
        return f"{len(self.wrongly_pruned)} of {self.num_audited} pruned candidates fit when measured anyway"


def to_audit(space: Space, records: Sequence[Record], belief: Belief) -> Candidate | None:
    """The next pruned candidate to measure; None if the share is done. Engines that did not start are not audited."""
    tried = measured(records)
    for candidate in space.candidates:
        if candidate.key not in tried and _drawn(candidate, space) and _pruned(candidate, space, records, belief):
            return candidate
    return None


def audit_report(space: Space, records: Sequence[Record]) -> AuditReport:
    """The result of the audit. Whether a candidate was pruned is decided by what was known before its trial."""
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
    """Whether the candidate belongs to the audited share; always the same for a candidate."""
    return zlib.crc32(candidate.key.encode()) < space.audit * (1 << 32)


def _pruned(candidate: Candidate, space: Space, records: Sequence[Record], belief: Belief) -> bool:
    verdict = ruled_out(candidate, space, records)
    if verdict is not None:
        return not failed_in_setup(verdict.record.outcome)
    return bool(records) and belief.outlook(candidate).fits < SLIM
