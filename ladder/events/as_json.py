"""Writes dataclasses as JSON and reads them back, with the standard library alone: ranks have nothing else for sure.

A number that is infinite or NaN is written as Python's json does, and read back.
"""

from __future__ import annotations

import functools
import json
import types
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


class NotReadError(ValueError):
    """What was written is not of the kind that is read."""


def to_json(value: Any, indent: int | None = None) -> str:
    """`value`, a dataclass of what `from_json` reads."""
    return json.dumps(asdict(value), indent=indent, separators=None if indent else (",", ":"))


def from_json(kind: type[Kind], text: str | bytes) -> Kind:
    """The dataclass `kind` that `text` says. NotReadError if it says another one, or none."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise NotReadError(f"no JSON: {error}") from None
    return from_plain(kind, found)


def from_plain(kind: type[Kind], value: Any) -> Kind:
    """As `from_json`, of what json.loads returned."""
    found: Kind = _read(kind, value)
    return found


def _read(kind: Any, value: Any) -> Any:
    if kind is Any or (value is None and kind is types.NoneType):
        return value
    if is_dataclass(kind) and isinstance(value, dict):
        return _read_dataclass(kind, value)
    if kind is float and type(value) is int:
        return float(value)
    if kind in (bool, int, float, str) and isinstance(value, kind):
        return value
    return _read_of(get_origin(kind), get_args(kind), value)


def _read_dataclass(kind: Any, value: dict[str, Any]) -> Any:
    known = _kinds_of_fields(kind)
    try:
        return kind(**{name: _read(known[name], each) for name, each in value.items()})
    except (KeyError, TypeError) as error:  # a name that it does not have, or one that is missing
        raise NotReadError(f"not a {kind}: {error}") from None


@functools.cache
def _kinds_of_fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read_of(origin: Any, of: tuple[Any, ...], value: Any) -> Any:
    """Of a kind that is made of others."""
    if origin is Literal and value in of:
        return value
    if origin in (Union, types.UnionType):
        for each in of:
            try:
                return _read(each, value)
            except NotReadError:
                continue
    if origin in (tuple, list) and isinstance(value, list):
        return origin(_read(of[0], each) for each in value)
    if origin is dict and isinstance(value, dict):
        # JSON's keys are strings.
        return {int(key) if of[0] is int else key: _read(of[1], each) for key, each in value.items()}
    raise NotReadError(f"not of the kind {origin} of {of}: {value!r}")
