"""Keeps track of what a rank has allocated, by part, and of the fullest instants of each moment of a step."""

from __future__ import annotations

from dataclasses import dataclass

START = "start"
"""The name of the moment at which an engine is made. It has to fit too, but a candidate's measured peak is later."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "live")


@dataclass(frozen=True)
class Moment:
    """Bytes allocated at one moment of a step, by part, before calibration."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    live: float = 0.0
    """Parameters gathered by stage 3 or FSDP2, and copies that autocast makes."""

    @property
    def total(self) -> float:
        kept = self.parameters + self.gradients + self.optimizer + self.activations
        return kept + self.logits + self.buffers + self.live


class Ledger:
    """The current allocations by name, their sum by part, and the fullest instant since the last `begin`."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, float]] = {}
        self._now = dict.fromkeys(PARTS, 0.0)
        self._total = self._most = 0.0
        self._name = ""
        self._fullest = dict(self._now)
        self._is_new = False
        """The present instant is the fullest, and not copied yet: most are followed by a fuller one."""
        self._closed: list[tuple[str, float, dict[str, float]]] = []

    def begin(self, name: str) -> None:
        """Begin a moment called `name`, or another stretch of one; the one before is over."""
        self._close()
        self._name, self._most, self._is_new = name, self._total, True

    def take(self, name: str, num_bytes: float, part: str) -> None:
        """Allocate more under `name`."""
        held = self._held.get(name)
        self._held[name] = (part, num_bytes if held is None else held[1] + num_bytes)
        self.add(num_bytes, part)

    def give(self, name: str) -> None:
        """Free everything under `name`, if there is anything."""
        held = self._held.pop(name, None)
        if held is not None:
            self.add(-held[1], held[0])

    def set(self, name: str, num_bytes: float, part: str) -> None:
        """Free what is under `name`, then allocate the new size."""
        self.give(name)
        if num_bytes:
            self.take(name, num_bytes, part)

    def add(self, num_bytes: float, part: str) -> None:
        """Allocate without a name, or free if `num_bytes` is negative."""
        if num_bytes < 0 and self._is_new:
            self._keep()
        self._now[part] += num_bytes
        self._total += num_bytes
        if self._total > self._most:
            self._most, self._is_new = self._total, True

    def touch(self, num_bytes: float, part: str) -> None:
        """Allocate, and free immediately."""
        if self._total + num_bytes > self._most:
            self.add(num_bytes, part)
            self.add(-num_bytes, part)

    def excess(self) -> dict[str, float]:
        """By part: what the fullest instant since `begin` has more than there is now."""
        if self._is_new:
            self._keep()
        return {part: amount - self._now[part] for part, amount in self._fullest.items()}

    def touch_all(self, amounts: dict[str, float], total: float) -> None:
        """Allocate these `amounts`, `total` together, by part, and free them immediately."""
        if self._total + total > self._most:
            self._most, self._is_new = self._total + total, False
            self._fullest = {part: amount + amounts[part] for part, amount in self._now.items()}

    def moments(self) -> list[Moment]:
        """All moments that are over, with the fullest stretches of each: those that one of its parts may make the peak.

        A stretch counts if none that is fuller has as much activations, or as much of all else.
        """
        self._close()
        found = []
        for name in dict.fromkeys(name for name, _, _ in self._closed):
            most_kept = most_else = -1.0
            own = sorted((each for each in self._closed if each[0] == name), key=lambda each: -each[1])
            for _, total, parts in own:
                kept = parts["activations"] + parts["logits"]
                if kept > most_kept or total - kept > most_else:
                    found.append(Moment(name, **parts))
                    most_kept, most_else = max(most_kept, kept), max(most_else, total - kept)
        return found

    def _keep(self) -> None:
        self._fullest, self._is_new = dict(self._now), False

    def _close(self) -> None:
        if self._name:
            if self._is_new:
                self._keep()
            self._closed.append((self._name, self._most, self._fullest))
