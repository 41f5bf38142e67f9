"""Bars of text characters, for terminals with or without colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLUMNS = "▁▂▃▄▅▆▇█"


def bar(fraction: float, width: int) -> Text:
    """A bar of `width` cells, of which `fraction` (0 to 1) is filled; all cells above 1."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Text(filled, _colour(fraction)) + Text("░" * (width - len(filled)), "dim")


def columns(fractions: Sequence[float]) -> Text:
    """One character per GPU; its height shows how full the memory is."""
    text = Text()
    for fraction in fractions:
        height = round(min(1.0, max(0.0, fraction)) * (len(_COLUMNS) - 1))
        text.append(_COLUMNS[height], _colour(fraction))
    return text


def _colour(fraction: float) -> str:
    return "red" if fraction > 1 else "yellow" if fraction > 0.97 else "green"
