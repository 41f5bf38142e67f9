"""The descendants of this process: they can all be found and killed, in whichever order they end."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
"""Defined in Linux's prctl.h."""
_LOOK_SECONDS = 0.01
"""Between two checks of processes that are being killed. Chosen: most end sooner."""


def adopt_orphans() -> None:
    """From now on, a descendant whose parent ends becomes a child of this process and not of init."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> bool:
    """Send SIGKILL to all that are alive; returns whether there were any. Repeat it for what they forked meanwhile."""
    alive = [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()  # psutil checks pid and start time before it signals
    return bool(alive)


def end_descendants(seconds: float) -> None:
    """Kill until none is alive, for at most `seconds`: a process that the kernel cannot end must not block us."""
    deadline = time.monotonic() + seconds
    while kill_descendants() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
