"""Names, paths and what trials say, in messages: data that may hold anything."""

from __future__ import annotations

import re

_SHORT_LINE = 14
"""Cells. Chosen: within the 16 that tables have for a rung's name on a narrow terminal."""


def shown(value: object) -> str:
    """`value` for one line of text, control characters spelled out: no data breaks the line or drives the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(value))


def in_short_lines(rung: str) -> str:
    """A rung's name in lines for a narrow column, parted where its words are."""
    first, *words = re.split(r"(?=\+)", rung)
    lines = [first]
    for word in words:
        if len(lines[-1]) + len(word) > _SHORT_LINE:
            lines.append(word)
        else:
            lines[-1] += word
    return "\n".join(lines)
