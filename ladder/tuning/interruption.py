"""Ctrl-C and its kin: the first signal ends the tune in good order, the second ends it at once."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICE = b"\nladder: ending the trial; what was measured is kept (once more: at once).\n"


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
        if number == signal.SIGHUP:
            _leave_terminal()
        with suppress(OSError):
            os.write(2, _NOTICE)  # not `print`: the signal may have come in the middle of one


def _leave_terminal() -> None:
    """The terminal is going or gone, and writing to it would fail; files and pipes still get their lines."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for fd in (1, 2):
        with suppress(OSError):  # a closed one
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                os.dup2(nowhere, fd)
    os.close(nowhere)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Within the block, signals are noted and not raised. Only the main thread may enter.

    A signal that was ignored before stays ignored: that is how `nohup` outlives its terminal.
    """
    interruption = Interruption()
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption._receive) for number in heeded}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
