"""Keeps track of a GPU's allocations and their peak."""

from __future__ import annotations

from collections.abc import Mapping

_BLOCK = 512
"""Bytes to a multiple of which torch's allocator rounds tensors (defined in c10/cuda/CUDACachingAllocator)."""


class Ledger:
    """The current allocations by name, and their peak."""

    def __init__(self, factors: Mapping[str, float] | None = None) -> None:
        """`factors` multiply sizes on this machine, by kind of allocation."""
        self._factors = factors or {}
        self._held: dict[str, int] = {}
        self._now = 0
        self.peak = 0
        self.moment = "initialisation"
        """The current part of the step."""
        self.fullest = self.moment
        """The part of the step in which the peak was."""

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
        """Free everything under `name`, if there is anything."""
        self._now -= self._held.pop(name, 0)

    def touch(self, num_bytes: float, kind: str = "states") -> None:
        """Allocate, and free immediately."""
        self.take("touched", num_bytes, kind)
        self.give("touched")

    def forget(self) -> None:
        """Reset the peak."""
        self.peak, self.fullest = self._now, self.moment

    def set(self, name: str, num_bytes: float, kind: str = "states") -> None:
        """Free what is under `name`, then allocate the new size."""
        self.give(name)
        if num_bytes:
            self.take(name, num_bytes, kind)
