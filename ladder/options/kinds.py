"""Which values an option takes: how they are written in Python and on the command line, and what they become."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from ladder.text import shown
from ladder.units import MIB, parse_bytes
from ladder.workload.lora import Lora, checked, lora_from_mapping, lora_from_text

_UNBOUNDED = 1e30
"""The limit for numbers. Chosen: no sensible value is near it, and no int below it is too large for a float."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of values."""

    read: Callable[[Any], Any]
    """Converts a value from Python to its own type; ValueError says what is wanted instead of an invalid one."""
    typed: Any
    """The type of the value on the command line."""
    parse: Callable[[str], Any] | None = None
    """Converts a text from the command line if its type cannot: a size or a duration with a unit. Raises ValueError."""
    metavar: str | None = None
    """The placeholder for the value in the help."""
    least: float | None = None
    most: float | None = None


def whole(least: int, most: int | None = None) -> Kind:
    """Whole numbers within bounds."""
    wanted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    limit = math.inf if most is None else most

    def read(value: Any) -> int:
        if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= limit:
            raise _unfit(value, wanted)
        return int(value)

    return Kind(read=read, typed=int, metavar="N", least=least, most=most)


def number(least: float = 0.0, most: float | None = None, *, metavar: str = "X") -> Kind:
    """Finite numbers within bounds: JSON has neither infinity nor NaN."""
    wanted = f"a number of at least {least:g}" if most is None else f"a number from {least:g} to {most:g}"
    limit = math.inf if most is None else most
    read = _number(wanted, lambda value: least <= value <= limit)
    return Kind(read=read, typed=float, metavar=metavar, least=least, most=most)


def above_zero(what: str = "number", *, metavar: str = "X") -> Kind:
    """Numbers above zero; messages call one a `what`."""
    return Kind(read=_number(f"a {what} above 0", lambda value: value > 0), typed=float, metavar=metavar)


def one_of(names: Collection[str]) -> Kind:
    """One of a few names."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{_seen(value)} is unknown; choose from {', '.join(names)}")
        return value

    return Kind(read=read, typed=Literal[tuple(names)], metavar="|".join(names))


def kind_of(annotation: Any) -> Kind:
    """The kind that follows from a field's type: a text, a path, a switch or one of a few names.

    TypeError for a number, since its type does not give its bounds.
    """
    if get_origin(annotation) is Literal:
        return one_of(get_args(annotation))
    if annotation not in _KINDS:
        raise TypeError(f"{annotation} does not say which values an option takes; declare its kind.")
    return _KINDS[annotation]


def value_type(annotation: Any) -> tuple[Any, bool]:
    """The type of one value of a field, and whether the field takes several in a tuple."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    several = get_origin(annotation) is tuple
    return (get_args(annotation)[0] if several else annotation), several


def duration(text: str) -> float:
    """Seconds of `90s`, `15m` or `2h`. ValueError for a number without a unit: it could be minutes or seconds."""
    try:
        seconds = float(text[:-1]) * _SECONDS[text[-1:]]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a duration; write it like 15m, 90s or 2h") from None
    if not seconds > 0:
        raise ValueError("a duration must be above zero")
    return seconds


def text_of(value: Any, wanted: str = "a text") -> str:
    """A text, or a path converted to a text."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise _unfit(value, wanted)
    return text


def _number(wanted: str, holds: Callable[[float], bool]) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not abs(value) < _UNBOUNDED or not holds(value):
            raise _unfit(value, wanted)
        return float(value)

    return read


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _unfit(value, "True or False")
    return value


def _size(value: Any) -> int:
    """A number is in bytes. One below a MiB is refused: its unit was probably forgotten."""
    return parse_bytes(value) if isinstance(value, str) else int(whole(MIB).read(value))


def _duration(value: Any) -> float:
    """A number is in seconds."""
    seconds = duration(value) if isinstance(value, str) else value
    return float(above_zero("number of seconds").read(seconds))


def _lora(value: Any) -> Lora:
    """Adapters as a text, as a mapping of peft's arguments, or as they are."""
    if isinstance(value, Mapping):
        return lora_from_mapping(value)
    return checked(value if isinstance(value, Lora) else lora_from_text(text_of(value)))


def _path(value: Any) -> Path:
    return Path(text_of(value, "a path"))


def _unfit(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{_seen(value)} is not valid; give {wanted}")


def _seen(value: Any) -> str:
    """`repr(value)`, cut to fit into a sentence."""
    return shown(repr(value))[:60]


SIZE = Kind(read=_size, typed=int, parse=parse_bytes, metavar="SIZE")
"""Bytes; a text has its unit, as in `80GiB`."""
DURATION = Kind(read=_duration, typed=float, parse=duration, metavar="TIME")
"""Seconds; a text has its unit, as in `15m`."""
LORA = Kind(read=_lora, typed=str, parse=lambda text: checked(lora_from_text(text)), metavar="NAME=VALUE,…")
"""Adapters; a text has peft's words, as in `r=16,targets=all-linear`."""
_KINDS = {
    bool: Kind(read=_switch, typed=bool),
    str: Kind(read=text_of, typed=str, metavar="TEXT"),
    Path: Kind(read=_path, typed=Path, metavar="PATH"),
}
