"""The kernel's count of OOM kills. If it rose during a trial, a rank that got SIGKILL ran out of host memory."""

from __future__ import annotations

from pathlib import Path

from ladder.machine.host import memory_cgroups


class OomKills:
    """Counts the OOM kills from now on in the memory cgroup (v2 or v1) of process `pid`."""

    def __init__(self, pid: int) -> None:
        self._files = [
            cgroup.folder / ("memory.events" if cgroup.v2 else "memory.oom_control") for cgroup in memory_cgroups(pid)
        ]
        self._before = self._count()

    def since(self) -> int:
        """How many there were since."""
        return max(0, self._count() - self._before)

    def _count(self) -> int:
        counts = (count for path in (*self._files, Path("/proc/vmstat")) if (count := _oom_kill(path)) is not None)
        return next(counts, 0)  # the count of the whole machine only if no cgroup has one


def _oom_kill(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        return None
    return None
