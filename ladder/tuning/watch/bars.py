"""Bars made of characters, for a terminal with and without colours."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLUMNS = "▁▂▃▄▅▆▇█"


def bar(fraction: float, width: int) -> Text:
    """`fraction` (0 to 1) of `width` cells filled; what is above 1 fills them all."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Text(filled, _colour(fraction)) + Text("░" * (width - len(filled)), "dim")


def columns(fractions: Sequence[float]) -> Text:
    """One character a GPU, as high as its memory is full."""
    text = Text()
    for fraction in fractions:
        height = round(min(1.0, max(0.0, fraction)) * (len(_COLUMNS) - 1))
        text.append(_COLUMNS[height], _colour(fraction))
    return text


def _colour(fraction: float) -> str:
    return "red" if fraction > 1 else "yellow" if fraction > 0.97 else "green"
