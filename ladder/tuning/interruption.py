"""Ctrl-C and its kin: the first signal ends what runs in good order, the second ends it at once."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from ladder.errors import LadderError
from ladder.machine.lease import InterruptedWaitError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICE = b"\nladder: ending the trial; what was measured is kept (once more: at once).\n"
_STOPPED = "stopped; what was measured is kept, and the same call goes on from there"


class InterruptedVerificationError(LadderError):
    """The user ended a verification; nothing is known."""

    exit_code = 130


class Interruption:
    """Which signal asked for the end; None so far. What a second one does is `at_once`'s to say."""

    def __init__(self, at_once: Callable[[int], NoReturn]) -> None:
        self.signal: int | None = None
        self._at_once = at_once

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention: 128 + the signal's number."""
        return 128 + (self.signal or 0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self._at_once(number)
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
    """For a command: within the block, signals are noted and not raised. Only the main thread may enter."""
    with _heeding(_SIGNALS, Interruption(_end_process)) as interruption:
        yield interruption


@contextmanager
def interruptible_call() -> Iterator[Interruption]:
    """For a function: the process, which may be a notebook's, outlives it.

    Ctrl-C ends what runs in good order, and is raised as KeyboardInterrupt after the block; a second one is raised
    wherever the block is. Only the main thread can handle signals: on any other, nothing interrupts the block.
    """
    is_main = threading.current_thread() is threading.main_thread()
    with _heeding((signal.SIGINT,) if is_main else (), Interruption(_raise_interrupt)) as interruption:
        try:
            yield interruption
        except (InterruptedWaitError, InterruptedVerificationError):
            raise KeyboardInterrupt(_STOPPED) from None
        if interruption():
            raise KeyboardInterrupt(_STOPPED)


@contextmanager
def _heeding(signals: Sequence[signal.Signals], interruption: Interruption) -> Iterator[Interruption]:
    """A signal that was ignored before stays ignored: that is how `nohup` outlives its terminal."""
    heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption._receive) for number in heeded}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_process(number: int) -> NoReturn:
    """The trial server sees the end of its stdin and kills the ranks; what is in the history stays."""
    os._exit(128 + number)


def _raise_interrupt(number: int) -> NoReturn:
    raise KeyboardInterrupt
