"""What must go wrong inside a process: a trial server preloads this, and SIGUSR1 then does what the fault file says.

Ranks inherit the handler through the fork. The fault file is named by LADDER_TEST_FAULT; each fault adds a line to the
file beside it, so that a test can see that it happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

_FAULT = Path(os.environ["LADDER_TEST_FAULT"])
PRINTED_BYTES = 96 << 20
HOSTILE = "\x1b[31m\x1b]0;owned\x07[/bold]\udcff\x00\r\u202e"


def _happened(what: object) -> None:
    with _FAULT.with_suffix(".happened").open("a") as file:
        file.write(f"{what}\n")


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _happened(os.getpid())


def hold_on_as_a_fork() -> None:
    """Like a data-loader worker: shares the rank's memory and files, and outlives it."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    _happened("forked")


def hold_on_in_a_session() -> None:
    """Out of reach of signals to the rank's group, and its parent is gone at once."""
    sleeper = "import os, time; os.fork() and os._exit(0); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True).wait()
    _happened("detached")


def leave_with_status_zero() -> None:
    _happened(os.getpid())
    os._exit(0)


def raise_hostile_text() -> None:
    _happened(os.getpid())
    raise RuntimeError(HOSTILE + "\nsecond line")


def print_a_lot() -> None:
    """Far more than a log may hold: text, bytes that are no text, and orders to a terminal."""
    block = (b"\x1b[2J\x1b]0;owned\x07\xff\xfe\x00" + b"x" * 1013) * 1024
    written = 0
    while written < PRINTED_BYTES:
        written += os.write(1 if written % 2 else 2, block)
    _happened(written)


def _act(number: int, frame: FrameType | None) -> None:
    globals()[_FAULT.read_text()]()


signal.signal(signal.SIGUSR1, _act)
