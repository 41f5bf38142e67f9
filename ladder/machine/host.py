"""Host memory: how much of it the kernel lets a process have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

from ladder.units import MIB

_UNLIMITED = 1 << 60

# For the environment of a rank on a CPU. glibc keeps freed blocks of up to 32 MiB, some 30 MiB more in one run than in
# the next; given a mapping each, they go back at once, and a rank holds what its tensors need.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}


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
