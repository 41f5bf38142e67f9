"""The kernel's count of processes it killed for want of memory: the evidence that makes a SIGKILL a host OOM."""

from __future__ import annotations

from pathlib import Path

from ladder.machine.host import memory_cgroups


class OomKills:
    """Counts from now on the OOM kills in the memory cgroup (v2 or v1) that process `pid` is in."""

    def __init__(self, pid: int) -> None:
        self._files = [
            cgroup.folder / ("memory.events" if cgroup.v2 else "memory.oom_control") for cgroup in memory_cgroups(pid)
        ]
        self._before = self._count()

    def since(self) -> int:
        """How far the count moved."""
        return max(0, self._count() - self._before)

    def _count(self) -> int:
        counts = (count for path in (*self._files, Path("/proc/vmstat")) if (count := _oom_kill(path)) is not None)
        return next(counts, 0)  # the whole machine's count only where no cgroup has one


def _oom_kill(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        return None
    return None
