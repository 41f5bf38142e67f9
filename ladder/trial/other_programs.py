"""How much of the cores that a rank may use other programs take, where that leaves none idle."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_FULL = 0.9
"""Of the cores' time: with less in use, what others take is not missed. Chosen."""
_LEAST_SECONDS = 0.5
"""Below which ticks of a hundredth say little. Chosen."""


class OtherPrograms:
    """Since the last `reset`. The tune's own processes are those of the controller, which started the server of the
    ranks.
    """

    def __init__(self) -> None:
        self._before = (0.0, 0.0, 0.0)

    def reset(self) -> None:
        self._before = _now()

    def share(self) -> float | None:
        """Of the cores' time, what others took; 0 where cores were idle, and None where that is not known."""
        used, passed, ours = (now - before for now, before in zip(_now(), self._before, strict=True))
        if passed < _LEAST_SECONDS:
            return None
        return max(0.0, used - ours) / passed if used > _FULL * passed else 0.0


def _now() -> tuple[float, float, float]:
    """Seconds for which our cores were used, those that passed on them, and those that the tune's processes used."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    used = passed = 0.0
    with suppress(OSError, ValueError):  # a sandbox may have no such file, or another
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in cores:
                user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, ticks[:8])
                used += (user + nice + system + interrupts + soft + stolen) / _TICKS
                passed += (user + nice + system + idle + waiting + interrupts + soft + stolen) / _TICKS
    return used, passed, _of_the_tune()


def _of_the_tune() -> float:
    """Seconds that the controller and its descendants have used, those that ended and were waited for included."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it ends meanwhile
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()  # a name may have blanks
            pid, parents_pid = int(folder.name), int(after_name[1])
            parents[pid], seconds[pid] = parents_pid, sum(map(int, after_name[11:15])) / _TICKS
    server = os.getppid()
    family = {parents.get(server, server), server} - {0, 1}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(seconds.get(pid, 0.0) for pid in family)
