"""The ledger: every candidate with what became of it, the reason, and the trial responsible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ladder.candidates import Candidate, Rung
from ladder.events.outcome import Record
from ladder.search.belief import LIKELY, Outlook, believe
from ladder.search.knobs import turned
from ladder.search.policy import answer
from ladder.search.space import REFUSED, Space, disproved, fastest, measured, probed, ruled_out
from ladder.units import format_bytes

Status = Literal["answer", "measured", "refused", "predicted", "pruned", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is believed of a candidate that was not tried, after everything that was measured."""

    tokens_per_second: float
    low: float
    """It is slower than this with 10 %."""
    high: float
    """It is faster than this with 10 %."""
    peak: int
    """Bytes of one device."""
    upper: int
    """It needs more than this with 1 %."""
    host: int
    """Bytes of all ranks."""
    fits: float
    """The probability that it fits."""
    probe: str | None = None
    """The trial that probed its engine, if one did."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the ledger: a candidate, or a whole rung that cannot work here."""

    rung: str
    candidate_key: str | None
    checkpointing: str
    """As `Candidate.checkpointing`; empty for a whole rung."""
    micro_batch: int | None
    accumulation: int | None
    status: Status
    record: Record | None
    why: str
    predicted: Predicted | None = None
    """For what was not tried."""
    disproved: bool = False
    """It fitted, and failed its proof of fit."""


def ledger(
    space: Space, records: Sequence[Record], unsupported: Mapping[Rung, str], *, on_paper: bool = False
) -> list[Entry]:
    """Every candidate in the documented order, those with other knobs, then the rungs this machine does not support.

    `on_paper`: nothing was run, so nothing is said to be proven.
    """
    teller = _Teller(space, records, on_paper)
    candidates = [*space.candidates, *(space.by_key[key] for key in turned(space, records))]
    return [
        *(teller.entry(candidate) for candidate in candidates),
        *(_unsupported(rung, reason) for rung, reason in unsupported.items()),
    ]


class _Teller:
    """What the records say about each candidate."""

    def __init__(self, space: Space, records: Sequence[Record], on_paper: bool) -> None:
        self._space, self._records, self._on_paper = space, records, on_paper
        self._best, self._tried = answer(records), measured(records)
        # Measurement beside measurement, which predictions are of, too: the answer's proof is another run.
        best = self._best
        self._fastest = fastest(records) if best is None else self._tried.get(best.candidate_key, best)
        self._belief, self._failed_proofs = believe(space, records), disproved(records)
        self._probes = {space.by_key[key].engine: record.trial for key, record in probed(records).items()}

    def entry(self, candidate: Candidate) -> Entry:
        record = self._tried.get(candidate.key)
        status, why, predicted = self._status(candidate, record)
        knobs = ", ".join(f"{name}={value}" for name, value in candidate.engine.knobs)  # the space's own have none
        return Entry(
            rung=candidate.engine.name,
            candidate_key=candidate.key,
            checkpointing=candidate.checkpointing,
            micro_batch=candidate.micro_batch,
            accumulation=candidate.accumulation,
            status=status,
            record=record,
            why=f"{why}; with {knobs}" if knobs else why,
            predicted=predicted,
            disproved=candidate.key in self._failed_proofs,
        )

    def _status(self, candidate: Candidate, record: Record | None) -> tuple[Status, str, Predicted | None]:
        if record is not None:
            return (
                *_verdict(record, self._best, self._fastest, self._failed_proofs, on_paper=self._on_paper),
                None,
            )
        if (ruled := ruled_out(candidate, self._space, self._records)) is not None:
            return "pruned", f"{ruled.reason} (trial {ruled.record.trial})", None
        predicted = _predicted(self._belief.outlook(candidate), self._probes.get(candidate.engine))
        return "predicted", _why_not(predicted, self._fastest, self._space), predicted


def _unsupported(rung: Rung, reason: str) -> Entry:
    return Entry(
        rung=rung.name,
        candidate_key=None,
        checkpointing="",
        micro_batch=None,
        accumulation=None,
        status="unsupported",
        record=None,
        why=reason,
    )


def _predicted(outlook: Outlook, probe: str | None) -> Predicted:
    speed = outlook.speed.tokens_per_second
    return Predicted(
        tokens_per_second=speed,
        low=speed * speed / outlook.optimistic,
        high=outlook.optimistic,
        peak=outlook.memory.peak,
        upper=outlook.memory.upper,
        host=outlook.memory.host,
        fits=outlook.fits,
        probe=probe,
    )


def _why_not(predicted: Predicted, fastest: Record | None, space: Space) -> str:
    """Why a candidate was not tried, with the numbers that decided it."""
    if predicted.fits < LIKELY:
        limit = space.memory_limit
        if predicted.peak > limit:
            return f"predicted to need {format_bytes(predicted.peak)} of {format_bytes(limit)}"
        if predicted.host > space.host_memory:
            return (
                f"predicted to need {format_bytes(predicted.host)} of host memory, of {format_bytes(space.host_memory)}"
            )
    speed = f"predicted {predicted.tokens_per_second:,.0f} tokens/s ({predicted.low:,.0f} to {predicted.high:,.0f})"
    speed += f" after its engine's probe (trial {predicted.probe})" if predicted.probe else ""
    if fastest is None or not fastest.tokens_per_second:
        return f"{speed}; the tune ended before it"
    ahead = predicted.high / fastest.tokens_per_second - 1
    if ahead <= 0:
        return f"{speed}; even the upper end is {-ahead:.0%} below the best"
    if ahead <= space.tolerance:
        return f"{speed}; at most {ahead:.1%} above the best, within the tolerance"
    return f"{speed}; could be up to {ahead:.0%} above the best, but the tune ended before it"


def _verdict(
    record: Record, best: Record | None, fastest: Record | None, failed_proofs: Mapping[str, Record], *, on_paper: bool
) -> tuple[Status, str]:
    """Of what was tried; `best` is the answer's proof, and `fastest` then its measurement."""
    if best is not None and record.candidate_key == best.candidate_key:
        return "answer", f"the fastest that fits, {'on paper' if on_paper else 'proven in fresh processes'}"
    if record.outcome.moment == REFUSED:
        return "refused", record.outcome.sentence
    if record.outcome.kind != "fits":
        return "measured", record.outcome.sentence
    if (failed_proof := failed_proofs.get(record.candidate_key)) is not None:
        return "measured", f"its proof of fit failed: {failed_proof.outcome.sentence}"
    own = fastest.tokens_per_second if best is not None and fastest is not None else None
    if not own or not record.tokens_per_second:
        return "measured", "fits"
    slower = 1 - record.tokens_per_second / own
    if slower <= 0:
        return (
            "measured",
            f"within the noise of the answer ({-slower:+.1%}), its proof came out slower or was not needed",
        )
    return "measured", f"{slower:.1%} slower than the answer"
