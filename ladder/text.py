"""Names, paths and what trials say, in messages: data that may hold anything."""

from __future__ import annotations


def shown(value: object) -> str:
    """`value` for one line of text, control characters spelled out: no data breaks the line or drives the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(value))
