"""Makes names, paths and the output of trials safe for messages, as they may contain anything. And digests."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

_SHORT_LINE = 14
"""Characters. Chosen: within the 16 that tables have for a rung's name on a narrow terminal."""


def shown(value: object) -> str:
    """`value` as one line of text with control characters escaped, so that it cannot change the terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(value))


def instead_of(name: object, names: Iterable[str]) -> str:
    """What may have been meant by `name`, which is none of `names`, or all of them: the end of a sentence."""
    known = list(names)
    near = difflib.get_close_matches(shown(name).lower(), known, n=3)
    return (
        f"did you mean {' or '.join(', '.join(near).rsplit(', ', 1))}?" if near else f"choose from {', '.join(known)}."
    )


def digest_of(facts: Any, digits: int) -> str:
    """Hex digits that change whenever anything in `facts`, which JSON can hold, changes."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:digits]


def in_short_lines(rung: str) -> str:
    """A rung's name broken into lines for a narrow column, at its plus signs."""
    first, *words = re.split(r"(?=\+)", rung)
    lines = [first]
    for word in words:
        if len(lines[-1]) + len(word) > _SHORT_LINE:
            lines.append(word)
        else:
            lines[-1] += word
    return "\n".join(lines)
