"""The ledger: every candidate with what became of it, the reason, and the trial responsible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ladder.candidates import Rung
from ladder.outcome import Record
from ladder.search.policy import answer
from ladder.search.space import Space, measured, ruled_out

Status = Literal["answer", "measured", "pruned", "unsupported", "untried"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the ledger: a candidate, or a whole rung that cannot work here."""

    rung: str
    candidate_key: str | None
    gradient_checkpointing: bool | None
    micro_batch: int | None
    accumulation: int | None
    status: Status
    record: Record | None
    why: str


def ledger(space: Space, records: Sequence[Record], unsupported: Mapping[Rung, str]) -> list[Entry]:
    """Every candidate in the documented order, then the rungs that this machine does not support."""
    best = answer(records)
    tried = measured(records)
    entries = []
    for candidate in space.candidates:
        record = tried.get(candidate.key)
        status, why = _verdict(record, best, space, records) if record else ("untried", "the tune ended before it")
        if record is None and (verdict := ruled_out(candidate, space, records)) is not None:
            status, why = "pruned", f"{verdict.reason} (trial {verdict.record.trial})"
        entries.append(
            Entry(
                rung=candidate.engine.key,
                candidate_key=candidate.key,
                gradient_checkpointing=candidate.gradient_checkpointing,
                micro_batch=candidate.micro_batch,
                accumulation=candidate.accumulation,
                status=status,
                record=record,
                why=why,
            )
        )
    for rung, reason in unsupported.items():
        entries.append(
            Entry(
                rung=rung.name,
                candidate_key=None,
                gradient_checkpointing=None,
                micro_batch=None,
                accumulation=None,
                status="unsupported",
                record=None,
                why=reason,
            )
        )
    return entries


def _verdict(record: Record, best: Record | None, space: Space, records: Sequence[Record]) -> tuple[Status, str]:
    if best is not None and record.candidate_key == best.candidate_key:
        return "answer", "the fastest that fits, proven in fresh processes"
    if record.outcome.kind != "fits":
        return "measured", record.outcome.sentence
    failed_proof = [
        proof
        for proof in records
        if proof.purpose == "proof" and proof.candidate_key == record.candidate_key and proof.outcome.kind != "fits"
    ]
    if failed_proof:
        return "measured", f"its proof of fit failed: {failed_proof[-1].outcome.sentence}"
    if best is None or not best.tokens_per_second or not record.tokens_per_second:
        return "measured", "fits"
    slower = 1 - record.tokens_per_second / best.tokens_per_second
    if slower <= 0:
        return (
            "measured",
            f"within the noise of the answer ({-slower:+.1%}), its proof came out slower or was not needed",
        )
    return "measured", f"{slower:.1%} slower than the answer"
