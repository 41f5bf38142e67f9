"""Host memory: how much of it the kernel lets this process have."""

from __future__ import annotations

from pathlib import Path

import psutil

_UNLIMITED = 1 << 60


def host_memory() -> int:
    """The cgroup's limit where it sets one, else MemTotal: ballooned machines report too little there."""
    limit = min((value for value in map(_read_int, _cgroup_limit_files()) if value), default=_UNLIMITED)
    return limit if limit < _UNLIMITED else int(psutil.virtual_memory().total)


def _cgroup_limit_files() -> list[Path]:
    root, files = Path("/sys/fs/cgroup"), []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            files += [folder / "memory.max" for folder in _upwards(root / path.lstrip("/"), root)]
        elif "memory" in controllers.split(","):
            base = root / "memory"
            files += [folder / "memory.limit_in_bytes" for folder in _upwards(base / path.lstrip("/"), base)]
    return files


def _upwards(folder: Path, root: Path) -> list[Path]:
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
