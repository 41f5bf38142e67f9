"""The host: how much memory and how many cores the kernel lets a process use."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from ladder.units import MIB

_UNLIMITED = 1 << 60
"""Bytes. Chosen: more than any machine has, and less than the 2⁶³ that a cgroup without a limit may report."""

# For the environment of a CPU rank, whose memory limit makes allocations fail. Large blocks get a mapping each and are
# returned at once: otherwise glibc keeps freed blocks of up to 32 MiB, and runs differ by some 30 MiB. Small blocks
# come from one heap with a reserve: at the limit a tensor must fail, which torch reports, and not a small object of
# oneDNN, which does not check the allocation and ends with a segmentation fault.
MALLOC_OF_A_CPU_RANK = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TOP_PAD_": str(8 * MIB),
}
# oneDNN keeps the kernels of the last 1,024 shapes, and experts and uneven batches have a new shape at every step.
# Measured with two cores in 40 steps, in MiB above the start and tokens per CPU second: a mixture of 16 experts of
# width 256 grew by 664 (1,720 tokens/s) with its default, 443 (1,094) with 32, 425 (1,188) with 8, 377 (855) with 1;
# a Llama of that width on uneven batches by 628 (1,986), 436 (2,008), 417 (1,836), 415 (1,160).
_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
_MOST_KERNELS = "32"
"""Chosen: it saves nearly as much memory as 1 does, and costs dense models no speed."""
# torch itself keeps the last 1,024 shapes of layers in 16 bits. Measured on one core in 14 steps of a mixture of 41
# million parameters, in MiB above the start and CPU seconds per step: 526 (1.39) with its default, 176 (1.44) with 128,
# 161 (1.35) with 32, 157 (1.47) with 1.
_LAYERS = "LRU_CACHE_CAPACITY"


def compiler() -> str:
    """The program that CXX names; CXX may be a command with arguments."""
    words = [word for word in shlex.split(os.environ.get("CXX", "")) if not word.startswith("-")]
    return words[-1] if words else "g++"


def environment_of_a_cpu_rank(own: Mapping[str, str]) -> dict[str, str]:
    """What a rank on the CPU sees beyond the user's `own` environment, which has the last word on caches of kernels."""
    kernels = {name: own[name] for name in _KERNELS if name in own} or {_KERNELS[0]: _MOST_KERNELS}
    return MALLOC_OF_A_CPU_RANK | kernels | {_LAYERS: own.get(_LAYERS, _MOST_KERNELS)}


class Cgroup(NamedTuple):
    """The folder of a cgroup, the root of its hierarchy, and whether it is version 2."""

    folder: Path
    root: Path
    v2: bool

    def upwards(self) -> list[Path]:
        """Its folder and those above it, up to the root. The limits of all of them apply."""
        return [folder for folder in (self.folder, *self.folder.parents) if folder.is_relative_to(self.root)]


def memory_cgroups(pid: int | str = "self") -> list[Cgroup]:
    """The memory cgroups of process `pid`; empty if the kernel shows none."""
    return _cgroups("memory", pid)


def cpu_cgroups() -> list[Cgroup]:
    """The CPU cgroups of this process."""
    return _cgroups("cpu", "self")


def _cgroups(controller: str, pid: int | str) -> list[Cgroup]:
    root = Path(os.environ.get("LADDER_CGROUP_ROOT", "/sys/fs/cgroup"))
    found = []
    try:
        lines = os.fsdecode(Path(f"/proc/{pid}/cgroup").read_bytes()).splitlines()
    except OSError:
        return []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            found.append(Cgroup(root / path.lstrip("/"), root, v2=True))
        elif controller in controllers.split(","):
            found.append(Cgroup(root / controller / path.lstrip("/"), root / controller, v2=False))
    return found


def host_memory() -> int:
    """Bytes of the cgroup's limit if it has one, otherwise MemTotal, which is too low on VMs with memory ballooning."""
    files = [
        folder / ("memory.max" if cgroup.v2 else "memory.limit_in_bytes")
        for cgroup in memory_cgroups()
        for folder in cgroup.upwards()
    ]
    limit = min((value for value in map(_read_int, files) if value), default=_UNLIMITED)
    return limit if limit < _UNLIMITED else int(psutil.virtual_memory().total)


def usable_cores() -> int:
    """The number of cores that this process may run on, or its CFS quota (rounded up) if that is lower."""
    quotas = [_quota(folder, cgroup.v2) for cgroup in cpu_cgroups() for folder in cgroup.upwards()]
    return min([len(os.sched_getaffinity(0)), *(math.ceil(cores) for cores in quotas if cores)])


def _quota(folder: Path, v2: bool) -> float | None:
    """The CFS quota of one cgroup, in cores; None if there is none."""
    files = ["cpu.max"] if v2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    try:
        quota, period = (int(word) for name in files for word in (folder / name).read_text().split())
    except (OSError, ValueError):  # there is no such file, or version 2 says "max"
        return None
    return quota / period if quota > 0 and period > 0 else None  # version 1 says -1


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
