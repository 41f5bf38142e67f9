"""Sizes and their text: the code uses bytes, output uses GiB."""

from __future__ import annotations

import re
from collections.abc import Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
"""Defined by IEC 80000-13: powers of 1,024."""

_FACTORS = {"B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TIB": GIB << 10}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `40GiB`, `700 MiB` or `24GB`. ValueError for anything else, also for a bare number."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    if match and not unit:
        raise ValueError(f"{text!r} has no unit; write it like 40GiB or 700MiB")
    if match is None or unit not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write it like 40GiB or 700MiB")
    size = float(match.group(1)) * _FACTORS[unit]
    if not 1 <= size < 1 << 62:
        raise ValueError(f"{text[:40]!r} is not a size of memory; write it like 40GiB or 700MiB")
    return int(size)


def format_bytes(num_bytes: float | None) -> str:
    """`num_bytes` in GiB with the unit, in MiB below 0.1 GiB, or a dash for None."""
    if num_bytes is None:
        return "–"
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.0f} MiB"


def gib(num_bytes: float | None) -> float | None:
    """`num_bytes` in GiB, rounded to three digits."""
    return None if num_bytes is None else round(num_bytes / GIB, 3)


def in_words(speeds: Sequence[float]) -> str:
    """One speed, or the lowest and the highest."""
    return " to ".join(f"{speed:,.0f}" for speed in speeds)


def counted(number: int, noun: str) -> str:
    """`number` with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parameters_in_words(number: int) -> str:
    """A number of parameters in words, such as `20.5 million parameters`."""
    for factor, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= 0.9995 * factor:  # what rounds to 1,000 of the smaller word
            return f"{number / factor:.3g} {word} parameters"
    return f"{number:,} parameters"
