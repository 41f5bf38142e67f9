"""The ledger as a table: trials.csv, a pandas DataFrame, and the table on the terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ladder.search.belief import LIKELY
from ladder.search.ledger import Entry
from ladder.text import in_short_lines
from ladder.units import GIB, counted, gib

if TYPE_CHECKING:
    import pandas as pd

_STYLES = {"answer": "bold green", "refused": "dim", "pruned": "dim", "predicted": "dim", "unsupported": "dim"}
_FAILED = "red"
_COUNTS = ("micro_batch", "accumulation", "num_steps")
_NO_PROOFS = 60
_NARROW = 80
_WIDE = 110
_LINES_OF_A_REASON, _SHORT_REASON = 2, 20
"""On a screen that is neither narrow nor wide, and the letters that one line has room for at 80 columns. Chosen: most
reasons fit, and a screen still shows ten candidates."""
_GROUPS = ((0, 1), (2,), (3, 4, 5))
"""Entries that fit, that failed and that were not tried, by the first number of `_order`."""
RUNG_CELLS = 16
"""Columns for a rung's name on a narrow terminal; longer names continue on a second line."""


def rows(entries: Sequence[Entry], seconds: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """One row of plain values per entry: GiB, seconds, tokens/s. `seconds` are those of trials by phase."""
    return [_row(entry, seconds.get(entry.record.trial, {}) if entry.record else {}) for entry in entries]


def _row(entry: Entry, seconds: Mapping[str, float]) -> dict[str, Any]:
    record = entry.record
    measurement = record.measurement if record else None
    speed = record.tokens_per_second if record else None
    proof = entry.proof.tokens_per_second if entry.proof else None
    predicted = entry.predicted.peak if entry.predicted else entry.foretold
    return {
        "rung": entry.rung,
        "checkpointing": entry.checkpointing,
        "micro_batch": entry.micro_batch,
        "accumulation": entry.accumulation,
        "status": entry.status,
        "outcome": record.outcome.kind if record else entry.status,
        "tokens_per_second": round(speed, 1) if speed else None,
        "proof_tokens_per_second": round(proof, 1) if proof else None,
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
        "joules_per_token": record.joules_per_token if record else None,
        "predicted_tokens_per_second": round(entry.predicted.tokens_per_second, 1) if entry.predicted else None,
        "predicted_low": round(entry.predicted.low, 1) if entry.predicted else None,
        "predicted_high": round(entry.predicted.high, 1) if entry.predicted else None,
        "predicted_device_gib": gib(predicted) if predicted is not None else None,
        "predicted_fits": round(entry.predicted.fits, 3) if entry.predicted else None,
        "trial": record.trial if record else None,
        "trial_seconds": round(sum(seconds.values()), 2) if seconds else None,
        "warnings": "; ".join(record.warnings) if record else "",
        "why": entry.why,
    }


def csv_text(table: Sequence[Mapping[str, Any]]) -> str:
    """At least one row, all with the same columns, as pandas would write them, whose import takes half a second."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def frame(entries: Sequence[Entry], seconds: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """The rows as a DataFrame; counts stay integers even if some rows have none."""
    import pandas as pd

    table = pd.DataFrame(rows(entries, seconds))
    return table.astype({name: "Int64" for name in _COUNTS if name in table})


def terminal_table(entries: Sequence[Entry], width: int = 160, most: int | None = None) -> Table:
    """The ledger for a terminal in at most `most` lines: the fastest first, then those that failed, then untried ones.

    Predictions for untried candidates have a ~, or a ≤ where the same work reached no more. Below 110 columns a reason
    has two lines and stands for the outcome; below 80 reasons and memory are left out, and below 60 the proofs;
    `ladder explain` has them. Unsupported rungs are in `unsupported_line`.
    """
    narrow, wide = width < _NARROW, width >= _WIDE
    proofs = width >= _NO_PROOFS and any(entry.proof for entry in entries)
    headings = ["rung", "ck" if narrow else "ckpt", "mb", "tok/s" if narrow else "tokens/s"]
    headings += [*(["proof"] if proofs else []), *([] if narrow else ["GiB"]), *(["outcome"] if narrow or wide else [])]
    shown = _on_a_screen(sorted(_folded(entries), key=_order), most, width)
    lines = [_cells(entry, proofs=proofs, width=width) for entry in shown]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1), header_style="bold")
    for name in headings:
        is_number = name not in ("rung", "ck", "ckpt", "outcome")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
    if not narrow:
        table.add_column("why", no_wrap=wide)
    taken = (max(map(len, "\n".join(column).splitlines())) + 2 for column in zip(headings, *lines, strict=True))
    room = (width - sum(taken)) * (1 if wide else _LINES_OF_A_REASON)
    for entry, line in zip(shown, lines, strict=True):
        failed = entry.status == "measured" and entry.record is not None and entry.record.outcome.kind != "fits"
        why = entry.brief or entry.why
        said = why if len(why) <= room else f"{why[: room - 1].rstrip()}…"
        table.add_row(
            *line, *([] if narrow else [escape(said)]), style=_FAILED if failed else _STYLES.get(entry.status, "")
        )
    return table


def left_out(entries: Sequence[Entry], width: int = 160, most: int | None = None) -> str:
    """A sentence on how many candidates `terminal_table` does not show; empty if it shows all."""
    folded = sorted(_folded(entries), key=_order)
    kept = {id(entry) for entry in _on_a_screen(folded, most, width)}
    number = sum(id(entry) not in kept for entry in entries if entry.status != "unsupported")
    if not number:
        return ""
    return f"{counted(number, 'more candidate')} not shown: `ladder explain` lists all, with their reasons."


def unsupported_line(entries: Sequence[Entry]) -> str:
    """A sentence with the rungs that cannot work here, by reason; empty if all can."""
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        if entry.status == "unsupported":
            reasons.setdefault(entry.why, []).append(entry.rung)
    said = "; ".join(f"{', '.join(rungs)} ({why})" for why, rungs in reasons.items())
    return f"Unsupported: {said}." if said else ""


def _cells(entry: Entry, *, proofs: bool, width: int) -> list[str]:
    """The cells of a line without its reason."""
    narrow, wide = width < _NARROW, width >= _WIDE
    speed, memory = _figures(entry)
    proof = f"{entry.proof.tokens_per_second:,.0f}" if entry.proof else ""
    return [
        entry.rung if wide else in_short_lines(entry.rung),
        entry.checkpointing,
        str(entry.micro_batch or ""),
        speed,
        *([proof] if proofs else []),
        *([] if narrow else [memory]),
        *([_ending(entry, narrow=narrow)] if narrow or wide else []),
    ]


def _figures(entry: Entry) -> tuple[str, str]:
    """Tokens/s and GiB, measured or predicted; without speed if it is not likely to fit."""
    if entry.predicted is not None:
        sign = "≤" if entry.predicted.is_held else "~"
        speed = f"{sign}{entry.predicted.tokens_per_second:,.0f}" if entry.predicted.fits >= LIKELY else ""
        return speed, f"~{entry.predicted.peak / GIB:.2f}"
    if entry.record is None or entry.record.measurement is None:
        return "", ""
    return f"{entry.record.tokens_per_second or 0:,.0f}", f"{entry.record.measurement.peak_device / GIB:.2f}"


def _ending(entry: Entry, *, narrow: bool) -> str:
    """Its outcome. Without a column for memory, the predicted memory if it is not likely to fit."""
    if narrow and entry.predicted is not None and entry.predicted.fits < LIKELY:
        return f"~{entry.predicted.peak / GIB:.0f} GiB"
    return entry.record.outcome.kind if entry.record and entry.status != "answer" else entry.status


def _on_a_screen(entries: Sequence[Entry], most: int | None, width: int) -> list[Entry]:
    """The `entries` (sorted) that fit into `most` lines: the first ones that fit, that failed, and untried ones."""
    known = [entry for entry in entries if entry.status != "unsupported"]

    def lines(entry: Entry) -> int:
        if width >= _WIDE:
            return 1
        is_long = width >= _NARROW and len(entry.brief or entry.why) > _SHORT_REASON
        return max(in_short_lines(entry.rung).count("\n") + 1, _LINES_OF_A_REASON if is_long else 1)

    if most is None or sum(map(lines, known)) <= most:
        return known
    fits, failed, untried = ([entry for entry in known if _order(entry)[0] in places] for places in _GROUPS)
    kept: set[int] = set()
    room = most
    # Unused lines of a group go to the next one. Those that fit come last here, so they get all remaining lines.
    for group, share in ((failed, most // 6), (untried, most // 3), (fits, most)):
        left = min(share, room)
        for entry in group:
            if lines(entry) > left:
                break
            left, room = left - lines(entry), room - lines(entry)
            kept.add(id(entry))
    return [entry for entry in known if id(entry) in kept]


def _folded(entries: Sequence[Entry]) -> list[Entry]:
    """Entries with one line per engine for pruned candidates with the same reason, and one for untried candidates.

    The latter is the fastest that is likely to fit, or else the one that needs least. trials.csv has all candidates.
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
    """A sort key for untried candidates: the most promising is the largest."""
    if entry.predicted is None:
        return True, 0.0
    fits = entry.predicted.fits >= LIKELY
    return fits, entry.predicted.tokens_per_second if fits else -entry.predicted.peak


def _order(entry: Entry) -> tuple[int, float]:
    place = {"answer": 0, "measured": 1, "predicted": 3, "refused": 4, "pruned": 5, "unsupported": 6}[entry.status]
    if entry.status == "measured" and entry.record is not None and entry.record.outcome.kind != "fits":
        place = 2
    if entry.predicted is not None:
        likely, promise = _promise(entry)
        return place, -promise if likely else math.inf
    return place, -(entry.record.tokens_per_second or 0.0) if entry.record else 0.0
