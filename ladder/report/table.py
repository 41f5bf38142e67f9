"""The ledger as a table: a pandas DataFrame, trials.csv, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ladder.search.belief import LIKELY
from ladder.search.ledger import Entry
from ladder.text import in_short_lines
from ladder.units import gib

if TYPE_CHECKING:
    import pandas as pd

_STYLES = {"answer": "bold green", "refused": "dim", "pruned": "dim", "predicted": "dim", "unsupported": "dim"}
_FAILED = "red"
_COUNTS = ("micro_batch", "accumulation", "num_steps")
_NARROW = 80
_WIDE = 110
RUNG_CELLS = 16
"""For a rung's name on a narrow terminal: the longer ones go on in a second line."""


def rows(entries: Sequence[Entry], seconds: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """One row an entry, plain values only: GiB, seconds, tokens/s. `seconds` are the trials' phases."""
    return [_row(entry, seconds.get(entry.record.trial, {}) if entry.record else {}) for entry in entries]


def _row(entry: Entry, seconds: Mapping[str, float]) -> dict[str, Any]:
    record = entry.record
    measurement = record.measurement if record else None
    speed = record.tokens_per_second if record else None
    return {
        "rung": entry.rung,
        "checkpointing": entry.checkpointing,
        "micro_batch": entry.micro_batch,
        "accumulation": entry.accumulation,
        "status": entry.status,
        "outcome": record.outcome.kind if record else entry.status,
        "tokens_per_second": round(speed, 1) if speed else None,
        "accumulate_seconds": measurement.accumulate_seconds if measurement else None,
        "boundary_seconds": measurement.boundary_seconds if measurement else None,
        "step_seconds": measurement.step_seconds(entry.accumulation) if measurement and entry.accumulation else None,
        "spread": measurement.spread if measurement else None,
        "num_steps": measurement.num_steps if measurement else None,
        "peak_allocated_gib": gib(measurement.peak_allocated) if measurement else None,
        "peak_reserved_gib": gib(measurement.peak_reserved) if measurement else None,
        "peak_device_gib": gib(measurement.peak_device) if measurement else None,
        "host_gib": gib(measurement.peak_host) if measurement else None,
        "utilisation": measurement.utilisation if measurement else None,
        "watts": measurement.watts if measurement else None,
        "joules_per_token": measurement.watts / speed if measurement and measurement.watts and speed else None,
        "predicted_tokens_per_second": round(entry.predicted.tokens_per_second, 1) if entry.predicted else None,
        "predicted_device_gib": gib(entry.predicted.peak) if entry.predicted else None,
        "trial": record.trial if record else None,
        "trial_seconds": round(sum(seconds.values()), 2) if seconds else None,
        "warnings": "; ".join(record.warnings) if record else "",
        "why": entry.why,
    }


def frame(entries: Sequence[Entry], seconds: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """The rows as a DataFrame; what is counted stays whole where some rows have no count."""
    import pandas as pd

    table = pd.DataFrame(rows(entries, seconds))
    return table.astype({name: "Int64" for name in _COUNTS if name in table})


def terminal_table(entries: Sequence[Entry], width: int = 160) -> Table:
    """The ledger for a terminal: the fastest first, then what failed, then what was not tried.

    Below 110 columns the reasons go, below 80 memory too: `ladder explain` has them.
    """
    narrow, wide = width < _NARROW, width >= _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1), header_style="bold")
    table.add_column("rung", no_wrap=True)
    table.add_column("ck" if narrow else "ckpt", no_wrap=True)
    for name in ("mb", "tok/s") if narrow else ("mb", "tokens/s", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True, overflow="ellipsis")
    if wide:
        table.add_column("why", ratio=1)
    for entry in sorted(_folded(entries), key=_order):
        row = _row(entry, {})
        failed = entry.status == "measured" and row["outcome"] != "fits"
        memory = f"{row['peak_device_gib']:.2f}" if row["peak_device_gib"] is not None else ""
        table.add_row(
            in_short_lines(entry.rung) if narrow else entry.rung,
            entry.checkpointing,
            str(entry.micro_batch or ""),
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            *([] if narrow else [memory]),
            row["outcome"] if entry.status != "answer" else "answer",
            *([escape(entry.why)] if wide else []),
            style=_FAILED if failed else _STYLES.get(entry.status, ""),
        )
    return table


def _folded(entries: Sequence[Entry]) -> list[Entry]:
    """One line for an engine's pruned candidates with the same reason, and one for all of those not tried.

    Of the latter, the fastest that is likely to fit; where none is, the one that needs least. trials.csv has them all.
    """
    seen: set[tuple[str, str]] = set()
    kept = []
    for entry in sorted(entries, key=_promise, reverse=True):
        if entry.status in ("pruned", "predicted"):
            key = (entry.rung, entry.why if entry.status == "pruned" else entry.status)
            if key in seen:
                continue
            seen.add(key)
        kept.append(entry)
    return kept


def _promise(entry: Entry) -> tuple[bool, float]:
    """What speaks for an untried candidate."""
    if entry.predicted is None:
        return True, 0.0
    fits = entry.predicted.fits >= LIKELY
    return fits, entry.predicted.tokens_per_second if fits else -entry.predicted.peak


def _order(entry: Entry) -> tuple[int, float]:
    place = {"answer": 0, "measured": 1, "refused": 3, "pruned": 3, "predicted": 4, "unsupported": 5}[entry.status]
    if entry.status == "measured" and entry.record is not None and entry.record.outcome.kind != "fits":
        place = 2
    return place, -(entry.record.tokens_per_second or 0.0) if entry.record else 0.0
