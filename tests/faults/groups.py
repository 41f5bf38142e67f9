"""The memory cgroups of this machine."""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def own_group(controllers: str) -> str:
    """The path of our own cgroup in the hierarchy of `controllers`, without the leading slash."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == controllers:
            return path.lstrip("/")
    return ""
