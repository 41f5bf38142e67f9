"""Ctrl-C and its kin: the first signal ends the tune in good order, the second ends it at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Which signal asked the tune to end; None so far."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + the signal's number."""
        return 128 + (self.signal or 0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # The trial server sees the end of its stdin and kills the ranks; what is in the history stays.
            os._exit(128 + number)
        self.signal = number


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Within the block, signals are noted and not raised. Only the main thread may enter."""
    interruption = Interruption()
    before = {number: signal.signal(number, interruption._receive) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
