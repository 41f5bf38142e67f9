"""A GPU's allocations in the order in which a trainer makes them, and the fullest moment."""

from __future__ import annotations

from collections.abc import Mapping

_BLOCK = 512
"""Bytes; torch.cuda's caching allocator rounds every tensor up to them (c10/cuda/CUDACachingAllocator)."""


class Ledger:
    """What is allocated now, by name, and the most that ever was."""

    def __init__(self, factors: Mapping[str, float] | None = None) -> None:
        """`factors`: how far this machine strays, by the kind of what is allocated."""
        self._factors = factors or {}
        self._held: dict[str, int] = {}
        self._now = 0
        self.peak = 0
        self.moment = "initialisation"
        """Which part of a step is under way."""
        self.fullest = self.moment
        """In which part the peak was."""

    @property
    def now(self) -> int:
        return self._now

    def take(self, name: str, num_bytes: float, kind: str = "states") -> None:
        """Allocate more under `name`."""
        size = -(-int(num_bytes * self._factors.get(kind, 1.0)) // _BLOCK) * _BLOCK
        self._held[name] = self._held.get(name, 0) + size
        self._now += size
        if self._now > self.peak:
            self.peak, self.fullest = self._now, self.moment

    def give(self, name: str) -> None:
        """Free all that is held under `name`, if anything is."""
        self._now -= self._held.pop(name, 0)

    def touch(self, num_bytes: float, kind: str = "states") -> None:
        """Allocate and free at once."""
        self.take("touched", num_bytes, kind)
        self.give("touched")

    def forget(self) -> None:
        """Look for the fullest moment from now on."""
        self.peak, self.fullest = self._now, self.moment

    def set(self, name: str, num_bytes: float, kind: str = "states") -> None:
        """Replace what is held under `name`; the old is freed first."""
        self.give(name)
        if num_bytes:
            self.take(name, num_bytes, kind)
