"""The descendants of this process: they can all be found and killed, in whichever order they end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LOOK_SECONDS = 0.01
"""Between two checks of processes that are being killed. Chosen: most end sooner."""


def has_children() -> bool:
    """Whether this process has any child, those included that have ended and were not waited for."""
    return any(each.parent == os.getpid() for each in _processes())


def kill_descendants() -> bool:
    """Send SIGKILL to all that are alive; returns whether there were any. Repeat it for what they forked meanwhile."""
    alive = [each for each in _descendants() if each.state != "Z"]
    for each in alive:
        now = _process(each.pid)
        if now is not None and now.started == each.started:  # no other process has got its number meanwhile
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
    return bool(alive)


def end_descendants(seconds: float) -> None:
    """Kill until none is alive, for at most `seconds`: a process that the kernel cannot end must not block us."""
    deadline = time.monotonic() + seconds
    while kill_descendants() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


class _Process(NamedTuple):
    """As proc(5) has it."""

    pid: int
    state: str
    parent: int
    started: int


def _descendants() -> list[_Process]:
    """The children before the grandchildren."""
    children: dict[int, list[_Process]] = {}
    for each in _processes():
        children.setdefault(each.parent, []).append(each)
    found = list(children.get(os.getpid(), []))
    for each in found:  # which grows meanwhile
        found += children.get(each.pid, [])
    return found


def _processes() -> list[_Process]:
    """All that can be seen."""
    found = (_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [each for each in found if each is not None]


def _process(pid: int) -> _Process | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # A program's name stands in parentheses, and may contain any character.
    fields = line.rpartition(")")[2].split()
    return _Process(pid, fields[0], int(fields[1]), int(fields[19]))
