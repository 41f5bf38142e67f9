"""The ledger as `ladder explain` prints it: a table, paragraphs on a narrow terminal, or one line each for a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ladder.search.belief import LIKELY
from ladder.search.ledger import Entry
from ladder.units import GIB

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

_WIDE_ENOUGH = 120
"""Terminals with at least this many columns get a table. Chosen by eye."""
_COLUMNS = ("rung", "ckpt", "mb", "status", "tokens/s", "proof", "GiB", "trial")
_NUMBERS = frozenset({"mb", "tokens/s", "proof", "GiB"})


def print_entries(entries: Sequence[Entry], console: Console) -> None:
    """Print all entries with their full reasons."""
    if not console.is_terminal:
        for line in unwrapped(entries):
            console.file.write(f"{line}\n")
        return
    parts = [_table(entries)] if console.width >= _WIDE_ENOUGH else [_lines(entry) for entry in entries]
    for part in parts:
        console.print(part)


def fastest_first(entries: Sequence[Entry], number: int) -> list[Entry]:
    """The first `number` entries: the answer, then the fastest that fit or are likely to, then by least memory."""
    return sorted(entries, key=lambda entry: (entry.status != "answer", -_speed(entry), _needs(entry)))[:number]


def unwrapped(entries: Sequence[Entry]) -> list[str]:
    """One line per candidate, for `grep` and `less -S`: columns, and the full reason at the end."""
    lines = [[*_COLUMNS, "why"], *([*_cells(entry), entry.why] for entry in entries)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_COLUMNS))]
    numbers = [name in _NUMBERS for name in _COLUMNS]
    return [
        "  ".join(
            [
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(line, widths, numbers, strict=False)
            ]
            + [line[-1]]
        )
        for line in lines
    ]


def _speed(entry: Entry) -> float:
    if entry.predicted is not None:
        return entry.predicted.tokens_per_second if entry.predicted.fits >= LIKELY else 0.0
    return (entry.record.tokens_per_second or 0.0) if entry.record and not entry.disproved else 0.0


def _needs(entry: Entry) -> float:
    return entry.predicted.peak if entry.predicted else math.inf


def _cells(entry: Entry) -> list[str]:
    speed, memory = _figures(entry)
    return [
        entry.rung,
        entry.checkpointing,
        str(entry.micro_batch or ""),
        entry.status,
        speed,
        f"{entry.proof.tokens_per_second:,.0f}" if entry.proof else "",
        memory,
        entry.record.trial if entry.record else "",
    ]


def _table(entries: Sequence[Entry]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    table.add_column("why", ratio=1)
    for entry in entries:
        table.add_row(*_cells(entry), escape(entry.why), style=_style(entry))
    return table


def _lines(entry: Entry) -> Group:
    """An entry as a paragraph, for a terminal without room for columns."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    head = f"{entry.candidate_key or entry.rung}: {entry.status}"
    speed, memory = _figures(entry)
    head += f", {speed} tokens/s" if speed else ""
    head += f", {memory} GiB" if memory else ""
    head += f", trial {entry.record.trial}" if entry.record is not None else ""
    why = Padding(Text(entry.why), (0, 0, 0, 2), style=_style(entry))
    return Group(Text(head, _style(entry)), why)


def _style(entry: Entry) -> str:
    return {"answer": "bold green", "measured": ""}.get(entry.status, "dim")


def _figures(entry: Entry) -> tuple[str, str]:
    """Tokens/s and GiB as measured, or the predicted range with a ~."""
    if entry.predicted is not None:
        speed, memory = entry.predicted, entry.predicted
        return f"~{speed.low:,.0f}–{speed.high:,.0f}", f"~{memory.peak / GIB:.1f}–{memory.upper / GIB:.1f}"
    if entry.record is None or entry.record.measurement is None:
        return "", ""
    return f"{entry.record.tokens_per_second or 0:,.0f}", f"{entry.record.measurement.peak_device / GIB:.1f}"
