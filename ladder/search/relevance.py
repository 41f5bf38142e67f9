"""Which records of a history apply to a space: a run folder may contain those of tunes with other options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.events.outcome import Measurement, Outcome, Record
from ladder.search.belief import HOST_DEVIATION
from ladder.search.knobs import plain
from ladder.search.script_faults import is_fault
from ladder.search.space import REFUSED, Space
from ladder.units import format_bytes

_TO_BE_MENDED = frozenset({"disk_full", "pinned_oom"})


def relevant(space: Space, records: Sequence[Record], since: str = "") -> list[Record]:
    """The records of candidates of `space`, with any knobs, under its limits.

    Left out are candidates that were refused or ran out of host memory if there is more host memory now, failures
    before the trial `since` that the user was asked to fix, and measurements with another NVMe folder. Candidates that
    were measured with more host memory than is allowed now count as not fitting.
    """
    return [
        _within_host_memory(record, space)
        for record in records
        if _is_of(space, record.candidate_key)
        and not _is_lifted(record, space)
        and not (record.trial < since and (record.outcome.kind in _TO_BE_MENDED or is_fault(record, space)))
        and record.nvme_path in (None, space.nvme_path)
    ]


def _is_of(space: Space, key: str) -> bool:
    return key in space.by_key or plain(space.named(key)).key in space.by_key


def _is_lifted(record: Record, space: Space) -> bool:
    outcome = record.outcome
    if outcome.moment == REFUSED:
        return (outcome.bytes_asked or 0) <= most_host_bytes(space)
    return outcome.host_memory is not None and space.host_memory > outcome.host_memory * (1 + HOST_DEVIATION)


def most_host_bytes(space: Space) -> float:
    """Candidates that are predicted to need no more than this are tried, as the prediction has this much error."""
    return space.host_memory * (1 + HOST_DEVIATION)


def _within_host_memory(record: Record, space: Space) -> Record:
    seen: Measurement | None = record.measurement
    if seen is None or record.purpose == "probe":
        return record
    held = space.on_host(seen.peak_host, seen.peak_device)
    if held <= most_host_bytes(space):
        return record
    sentence = (
        f"its ranks used {format_bytes(held)} of host memory, and they may use {format_bytes(space.host_memory)} "
        "(--host-memory)"
    )
    outcome = Outcome(kind="host_oom", sentence=sentence, bytes_asked=held, bytes_free=space.host_memory)
    return replace(record, outcome=outcome, measurement=None, tokens_per_second=None)
