"""Ctrl-C and other signals: the first one ends a tune in an orderly way, the second one ends it at once."""

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
_NOTICE = b"\nladder: ending the trial; what was measured is kept (press again to end at once).\n"
_STOPPED = "stopped; what was measured is kept, and the same call continues from there"


class InterruptedVerificationError(LadderError):
    """The user ended a verification, so it has no result."""

    exit_code = 130


class Interruption:
    """The signal that asked for the end, or None. A second signal calls `at_once`."""

    def __init__(self, at_once: Callable[[int], NoReturn]) -> None:
        self.signal: int | None = None
        self._at_once = at_once

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as in a shell."""
        return 128 + (self.signal or 0)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self._at_once(number)
        self.signal = number
        if number == signal.SIGHUP:
            _leave_terminal()
        with suppress(OSError):
            os.write(2, _NOTICE)  # not `print`: the signal may have interrupted one


def _leave_terminal() -> None:
    """Stop writing to the terminal, which is closed or closing; output to files and pipes continues."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for fd in (1, 2):
        with suppress(OSError):  # it may be closed
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                os.dup2(nowhere, fd)
    os.close(nowhere)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """For a command: within the block, signals are recorded and raise nothing. For the main thread only."""
    with _heeding(_SIGNALS, Interruption(_end_process)) as interruption:
        yield interruption


@contextmanager
def interruptible_call() -> Iterator[Interruption]:
    """For a function call, after which the process continues (a notebook, for example).

    Ctrl-C ends the tune in an orderly way and is raised as KeyboardInterrupt after the block. A second Ctrl-C is raised
    at once. Only the main thread can handle signals, so on another thread nothing interrupts the block.
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
    """Handle `signals` in the block. One that was ignored before stays ignored, for `nohup`."""
    heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption._receive) for number in heeded}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_process(number: int) -> NoReturn:
    """End this process at once. The trial server then sees the end of its stdin and kills the ranks."""
    os._exit(128 + number)


def _raise_interrupt(number: int) -> NoReturn:
    raise KeyboardInterrupt
