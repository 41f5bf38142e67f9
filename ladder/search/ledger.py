"""The ledger: every candidate with its status, the reason, and the trial that decided it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ladder.candidates import Candidate, Rung
from ladder.events.outcome import Record
from ladder.search.auto import ONE_IN_TEN, is_worth_a_trial
from ladder.search.belief import LIKELY, SLIM, Belief, Outlook, believe
from ladder.search.knobs import turned
from ladder.search.policy import answer, faster_without_deepspeed
from ladder.search.space import REFUSED, Space, disproved, fastest, measured, probed, proven, ruled_out
from ladder.search.speed import STEP_NOISE
from ladder.units import format_bytes

Status = Literal["answer", "measured", "refused", "predicted", "pruned", "unsupported"]

_NOISE = 2 * STEP_NOISE
"""Trials whose speeds differ by no more than this fraction may be equally fast. Derived: each has an error of
STEP_NOISE."""


_AT_THE_END = f"{ONE_IN_TEN} "


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction for a candidate that was not tried, calibrated by all measurements."""

    tokens_per_second: float
    low: float
    """It is slower than this with a probability of 10 %."""
    high: float
    """It is faster than this with a probability of 10 %."""
    peak: int
    """Bytes per GPU."""
    upper: int
    """It needs more than this with a probability of 1 %."""
    host: int
    """Bytes of all ranks."""
    fits: float
    """The probability that it fits."""
    probe: str | None = None
    """The trial that probed its engine, if one did."""
    is_held: bool = False
    """`tokens_per_second` is what the same steps reached on another engine or with a larger micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the ledger: a candidate, or a whole rung that cannot work here."""

    rung: str
    candidate_key: str | None
    checkpointing: str
    """See `Candidate.checkpointing`; empty for a whole rung."""
    micro_batch: int | None
    accumulation: int | None
    status: Status
    record: Record | None
    why: str
    predicted: Predicted | None = None
    """For a candidate that was not tried."""
    foretold: int | None = None
    """For a candidate that was tried: the bytes per GPU that were predicted right before its trial."""
    disproved: bool = False
    """It fitted in its trial, but not in its proof."""
    proof: Record | None = None
    """The proof that it passed. Its speed may differ from that of the trial in `record`."""
    brief: str = ""
    """`why` in a few words for a table, without the figures that have their own columns."""


def ledger(
    space: Space, records: Sequence[Record], unsupported: Mapping[Rung, str], *, on_paper: bool = False
) -> list[Entry]:
    """All candidates in the documented order, then those with other knobs, then the rungs that are not supported.

    `on_paper` says that trials were simulated, so that nothing is called proven.
    """
    teller = _Teller(space, records, on_paper)
    candidates = [*space.candidates, *(space.by_key[key] for key in turned(space, records))]
    return [
        *(teller.entry(candidate) for candidate in candidates),
        *(_unsupported(rung, reason) for rung, reason in unsupported.items()),
    ]


class _Teller:
    """Makes the entries of a ledger."""

    def __init__(self, space: Space, records: Sequence[Record], on_paper: bool) -> None:
        self._space, self._records, self._on_paper = space, records, on_paper
        self._best, self._tried = answer(records), measured(records)
        self._plain = faster_without_deepspeed(records, space.tolerance)
        self._fastest = fastest(records)
        self._belief, self._failed_proofs, self._proofs = believe(space, records), disproved(records), proven(records)
        self._beliefs: dict[str, Belief] = {}
        self._probes = {space.by_key[key].engine: record.trial for key, record in probed(records).items()}

    def entry(self, candidate: Candidate) -> Entry:
        record = self._tried.get(candidate.key)
        status, why, brief, predicted = self._status(candidate, record)
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
            foretold=self._before(record).outlook(candidate).memory.peak if record is not None else None,
            disproved=candidate.key in self._failed_proofs,
            proof=self._proofs.get(candidate.key),
            brief=brief,
        )

    def _before(self, record: Record) -> Belief:
        """What was believed when the trial of `record` began: calibrated by all trials before it."""
        if record.trial not in self._beliefs:
            earlier = itertools.takewhile(lambda other: other.trial != record.trial, self._records)
            self._beliefs[record.trial] = believe(self._space, list(earlier))
        return self._beliefs[record.trial]

    def _status(self, candidate: Candidate, record: Record | None) -> tuple[Status, str, str, Predicted | None]:
        if record is not None:
            status, why = self._verdict(record)
            return status, why, "", None
        if (ruled := ruled_out(candidate, self._space, self._records)) is not None:
            return "pruned", f"{ruled.reason} (trial {ruled.record.trial})", "", None
        outlook = self._belief.outlook(candidate)
        predicted = _predicted(outlook, self._probes.get(candidate.engine))
        why, brief = self._why_not_tried(outlook, predicted)
        return "predicted", why, brief, predicted

    def _verdict(self, record: Record) -> tuple[Status, str]:
        """The status and the reason for a candidate that was tried."""
        proof = self._proofs.get(record.candidate_key)
        reached = f"its proof reached {proof.tokens_per_second:,.0f} tokens/s" if proof else ""
        if self._best is not None and record.candidate_key == self._best.candidate_key:
            what = "the fastest with DeepSpeed" if self._plain not in (None, self._best) else "the fastest that fits"
            proven_how = "simulated" if self._on_paper else "proven in fresh processes"
            return "answer", f"{what}, {proven_how}; {reached}"
        if record.outcome.moment == REFUSED:
            return "refused", record.outcome.sentence
        if record.outcome.kind != "fits":
            return "measured", record.outcome.sentence
        if (failed_proof := self._failed_proofs.get(record.candidate_key)) is not None:
            return "measured", f"its proof of fit failed: {failed_proof.outcome.sentence}"
        if self._best is None:
            return "measured", "fits"
        if self._plain is not None and record.candidate_key == self._plain.candidate_key:
            return "measured", f"faster than the answer, without DeepSpeed; {reached}"
        return "measured", self._against_the_answer(record, self._best, reached)

    def _against_the_answer(self, record: Record, best: Record, reached: str) -> str:
        """Compares trial with trial, and proof with proof; `reached` is empty if `record` is not proven."""
        trial = self._tried.get(best.candidate_key, best).tokens_per_second
        if not trial or not record.tokens_per_second or not best.tokens_per_second:
            return "fits"
        ahead = record.tokens_per_second / trial - 1
        if ahead < 0:
            return f"{-ahead:.1%} slower than the answer" + (f"; {reached}" if reached else "")
        faster = f"{ahead:+.1%} against the answer's trial"
        if reached:
            return f"{faster}, but {reached} and the answer's {best.tokens_per_second:,.0f}"
        if ahead <= _NOISE:
            return f"within the noise of the answer ({ahead:+.1%})"
        behind = record.tokens_per_second / best.tokens_per_second - 1
        seen = record.measurement
        why = ", as the allocator emptied its cache in its trial" if seen is not None and seen.alloc_retries else ""
        return f"{faster}, and {behind:+.1%} against its proof; not proven itself{why}"

    def _why_not_tried(self, outlook: Outlook, predicted: Predicted) -> tuple[str, str]:
        """Why a candidate was not tried, with the figures that decided it; in full, and in short for a table."""
        space, best = self._space, self._fastest.tokens_per_second if self._fastest else None
        promise = _promise(predicted, best)
        if predicted.fits < LIKELY and (needs := _needs(predicted, space)):
            chance = f"; it fits with a probability of {predicted.fits:.0%}" if predicted.fits >= SLIM else ""
            if chance and best and predicted.high > best:
                chance += f", {promise}"
            return f"predicted to need {needs}{chance}", f"needs {needs}"
        speed = f"predicted {predicted.tokens_per_second:,.0f} tokens/s ({predicted.low:,.0f} to {predicted.high:,.0f})"
        speed += f" after its engine's probe (trial {predicted.probe})" if predicted.probe else ""
        if predicted.is_held:
            speed = f"at most {predicted.tokens_per_second:,.0f} tokens/s, which the same work reached elsewhere"
        if not best:
            return f"{speed}; the tune ended before it", "the tune ended before it"
        brief = f"at {'most' if predicted.high > best else 'least'} {promise.removeprefix(_AT_THE_END)}"
        if best < predicted.high <= best * (1 + space.tolerance):
            promise += ", within the tolerance"
        elif predicted.high > best:
            is_worth_it = is_worth_a_trial(outlook, best, space.tolerance)
            reason = "the tune ended before it" if is_worth_it else "its expected gain is not worth a trial"
            promise += f", but {reason}"
        return f"{speed}; {promise}", brief


def _promise(predicted: Predicted, best: float | None) -> str:
    """How far its upper end is from `best`, in tokens/s, in the words of the bound with which a search ends."""
    if not best:
        return ""
    ahead = predicted.high / best - 1
    return f"{_AT_THE_END}{abs(ahead):.1%} {'above' if ahead > 0 else 'below'} the fastest trial"


def _needs(predicted: Predicted, space: Space) -> str:
    """The memory that it is predicted to need if that is too much on the GPU or the host; otherwise empty."""
    if predicted.peak > space.memory_limit:
        return f"{format_bytes(predicted.peak)}, and there are {format_bytes(space.memory_limit)}"
    if predicted.host > space.host_memory:
        return f"{format_bytes(predicted.host)} of host memory, and there are {format_bytes(space.host_memory)}"
    return ""


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
    return Predicted(
        tokens_per_second=outlook.tokens_per_second,
        low=outlook.pessimistic,
        high=outlook.optimistic,
        peak=outlook.memory.peak,
        upper=outlook.memory.upper,
        host=outlook.memory.host,
        fits=outlook.fits,
        probe=probe,
        is_held=outlook.is_held,
    )
