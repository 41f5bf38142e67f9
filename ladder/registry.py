"""A registry: what there is of one sort, by name, in the order in which it is tried and listed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar


class Named(Protocol):
    name: str


Known = TypeVar("Known", bound=Named)


class Registry(Mapping[str, Known]):
    def __init__(self, *known: Known) -> None:
        self._known: dict[str, Known] = {each.name: each for each in known}

    def __getitem__(self, name: str) -> Known:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
