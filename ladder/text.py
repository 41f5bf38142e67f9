"""Names and paths in messages: data that may hold anything."""

from __future__ import annotations


def shown(value: object) -> str:
    """`value` for one line of text: as it is, or escaped where it would break the line or paint the terminal."""
    text = str(value)
    return text if text.isprintable() else ascii(text)
