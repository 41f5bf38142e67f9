"""Host memory: how much of it the kernel lets a process have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from ladder.units import MIB

_UNLIMITED = 1 << 60

# For the environment of a CPU rank, which is held to a limit by failing allocations. Large blocks get a mapping each
# and go back at once: glibc otherwise keeps freed ones of up to 32 MiB, some 30 MiB more in one run than in the next.
# Small ones come from one heap that is ahead of them: at the limit a tensor must fail, which torch reports, and not a
# small object of oneDNN's, which does not look whether it got one and dies of a segmentation fault.
MALLOC_OF_A_CPU_RANK = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": str(8 * MIB),
}


class MemoryCgroup(NamedTuple):
    """The folder of a memory cgroup, the root of its hierarchy, and whether that is of version 2."""

    folder: Path
    root: Path
    v2: bool


def memory_cgroups(pid: int | str = "self") -> list[MemoryCgroup]:
    """The memory cgroups that process `pid` is in; none where the kernel tells of none."""
    root = Path(os.environ.get("LADDER_CGROUP_ROOT", "/sys/fs/cgroup"))
    found = []
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            found.append(MemoryCgroup(root / path.lstrip("/"), root, v2=True))
        elif "memory" in controllers.split(","):
            found.append(MemoryCgroup(root / "memory" / path.lstrip("/"), root / "memory", v2=False))
    return found


def host_memory() -> int:
    """The cgroup's limit where it sets one, else MemTotal: ballooned machines report too little there."""
    files = [
        folder / ("memory.max" if cgroup.v2 else "memory.limit_in_bytes")
        for cgroup in memory_cgroups()
        for folder in (cgroup.folder, *cgroup.folder.parents)
        if folder.is_relative_to(cgroup.root)
    ]
    limit = min((value for value in map(_read_int, files) if value), default=_UNLIMITED)
    return limit if limit < _UNLIMITED else int(psutil.virtual_memory().total)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
