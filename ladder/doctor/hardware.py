"""Checks of the driver and GPUs, host memory, /dev/shm, locked memory, libaio and the NVMe folder."""

from __future__ import annotations

import ctypes.util
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pynvml

from ladder.doctor.check import Check, fail, ok, parted, unseen, warn
from ladder.doctor.drive import read_speed
from ladder.errors import LadderError
from ladder.machine.gpus import driver_version, obstacle, visible_gpus
from ladder.machine.host import host_memory
from ladder.machine.interpreter import python_version
from ladder.machine.nvme import check_nvme_path
from ladder.units import GIB, MIB, format_bytes

_LITTLE_SHM = 256 * MIB
"""Less shared memory than this is a warning, as ranks communicate through it. Chosen: four times the 64 MiB that
containers often have."""
_SLOW_DRIVE = 1e9
"""Bytes per second below which NVMe offload is hardly useful. Chosen: a step moves 30 bytes per parameter, so a billion
parameters take half a minute."""


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports; None without a driver."""
    try:
        pynvml.nvmlInit()
        version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except pynvml.NVMLError:
        return None
    return version // 1000, version % 1000 // 10


def gpus() -> Iterator[Check]:
    """The driver, and whether each GPU is free."""
    try:
        found = visible_gpus()
    except LadderError as error:
        yield fail("GPUs", *parted(str(error), "make nvidia-smi list the GPUs, or tune on the CPU with --gpus 0"))
        return
    if not found:
        fix = "if this machine has GPUs: install the NVIDIA driver (nvidia-smi lists them), unset CUDA_VISIBLE_DEVICES"
        yield warn("GPUs", "none is visible; a tune runs on the CPU", fix)
        return
    yield ok("driver", driver_version(), driver=driver_version())
    for number, gpu in enumerate(found):
        in_the_way = obstacle(gpu, None)
        if in_the_way is None:
            yield ok(f"GPU {number}", f"{gpu.name}, {format_bytes(gpu.total_bytes)}, free", bytes=gpu.total_bytes)
        else:
            severity = fail if in_the_way.lasting else warn
            yield severity(f"GPU {number}", *parted(in_the_way.sentence, f"nvidia-smi --gpu-reset -i {number}"))


def memory() -> Iterator[Check]:
    """Host memory and the cgroup's limit, shared memory, and how much memory may be locked."""
    total, allowed = int(psutil.virtual_memory().total), host_memory()
    facts = {"total_gib": round(total / GIB, 2), "allowed_gib": round(allowed / GIB, 2)}
    held = f", limited to {format_bytes(allowed)} by the cgroup" if allowed < total else ""
    yield ok("host memory", f"{format_bytes(total)}{held}", **facts)
    yield _shared_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= allowed // 2:
        yield ok("locked memory", "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft))
    else:
        # The limit does not apply to CUDA's pinned memory, but to buffers of io_uring and libaio and to some MPIs.
        fix = "ulimit -l unlimited, or memlock in /etc/security/limits.conf (in a container: --ulimit memlock=-1)"
        yield warn("locked memory", f"at most {format_bytes(soft)} may be locked; RDMA between nodes needs more", fix)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    try:
        usage = os.statvfs(folder)
    except OSError as error:
        return fail(
            "/dev/shm",
            f"cannot be used ({error.strerror})",
            "mount -t tmpfs -o size=8g tmpfs /dev/shm (in a container: --shm-size=8g)",
        )
    free = usage.f_bavail * usage.f_frsize
    if free < _LITTLE_SHM:
        fix = "in a container: --shm-size=8g or --ipc=host; elsewhere remove old files there"
        return warn("/dev/shm", f"only {format_bytes(free)} are free, and ranks communicate through it", fix, free=free)
    return ok("/dev/shm", f"{format_bytes(free)} free", free=free)


def nvme(path: Path | None) -> Iterator[Check]:
    """libaio, and the folder for NVMe offload with its measured speeds."""
    if ctypes.util.find_library("aio") is None:
        severity = warn if path is None else fail
        yield severity("libaio", "is missing; the NVMe rungs need it", "apt-get install libaio-dev (Debian, Ubuntu)")
    else:
        yield ok("libaio", "is installed")
    if path is None:
        yield unseen("NVMe folder", "not checked: name one with --nvme-path")
        return
    try:
        write, read = check_nvme_path(path), read_speed(path)
    except LadderError as error:
        yield fail("NVMe folder", str(error), "choose a folder on a local NVMe file system")
        return
    sentence = f"O_DIRECT works; it writes {write / 1e9:.2f} GB/s and reads {read / 1e9:.2f} GB/s"
    facts = {"write_bytes_per_second": round(write), "read_bytes_per_second": round(read)}
    if min(write, read) < _SLOW_DRIVE:
        yield warn("NVMe folder", f"{sentence}, which is slow for offload", "choose a faster drive", **facts)
    else:
        yield ok("NVMe folder", sentence, **facts)


def python() -> Iterator[Check]:
    """The version of Python."""
    version = python_version()
    yield ok("python", version, version=version)
