"""The CPU cores that this process may use, in the order of their places."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def usable_by_place() -> list[int]:
    """The numbers of the CPUs that this process may run on, by place."""
    return by_place(os.sched_getaffinity(0))


def by_place(cpus: Iterable[int], root: Path = _CPUS) -> list[int]:
    """`cpus` by NUMA node, socket and core, so that both threads of a core stand side by side.

    Their numbers alone would not do: Linux usually counts the first thread of all cores before the second of any. By
    number where the kernel says nothing.
    """
    return sorted(cpus, key=lambda cpu: (*_place(root / f"cpu{cpu}"), cpu))


def _place(folder: Path) -> tuple[int, int, int]:
    """The NUMA node, the socket and the core of the CPU with this folder; zeros for what is not said."""
    nodes = [int(each.name.removeprefix("node")) for each in folder.glob("node[0-9]*")]
    return min(nodes, default=0), _number(folder / "topology/physical_package_id"), _number(folder / "topology/core_id")


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
