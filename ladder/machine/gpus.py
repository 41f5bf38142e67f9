"""The GPUs of this host according to NVML, and why one cannot be used."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.events.protocol import RUN_MARKER
from ladder.machine.described import GROWING, HUGE_PAGES, PINNING, Gpu
from ladder.units import format_bytes

_BUSY_FRACTION = 0.10
"""A GPU with more of its memory in use than this is busy. Chosen: drivers and displays use a little without any
process, and a tune needs the rest."""
_NO_GPU_HERE = frozenset(
    {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
    }
)


_OF_TORCH = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set is the one that torch's allocators for CUDA read."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@dataclass(frozen=True)
class Obstacle:
    """Why a GPU cannot be used. The caller completes `sentence`."""

    sentence: str
    passing: bool = False
    """It will go away in seconds by itself."""
    lasting: bool = False
    """It will not go away while the tune waits."""


def allocator_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The user's allocator settings in `environment`, with the best ones for trials where they say nothing.

    Many set `expandable_segments:True`, as torch advises when memory runs out; they too get the fast pinning.
    """
    own = allocator_in(environment)
    read = next((name for name in _OF_TORCH if name in own), _OF_TORCH[0])
    words = own.get(read, GROWING)
    if may_register() and "pinned_" not in words:
        words += f",{PINNING}"
    return HUGE_PAGES | own | {read: words}


def may_register() -> bool:
    """Whether torch can pin memory that the C library allocated, as on most hosts.

    Not under WSL, where such memory has another address on the GPU; and not with strict overcommit, where the
    allocation may fail and torch does not check it.
    """
    try:
        is_strict = _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        is_strict = False
    return not is_strict and "microsoft" not in platform.release().lower()


def allocator_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings in `environment` for the allocators of torch and of the C library."""
    return {name: environment[name] for name in (*_OF_TORCH, *HUGE_PAGES) if environment.get(name)}


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA would show, in its order; empty without a driver.

    EnvironmentFaultError if there is a driver but it does not work: using the CPU instead would surprise the user.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        if error.value in _NO_GPU_HERE:
            return []
        raise EnvironmentFaultError(
            f"NVML cannot be used: {_explained(error)}, or tune on the CPU with --gpus 0."
        ) from None
    gpus, visible = [_gpu(index) for index in range(count)], os.environ.get("CUDA_VISIBLE_DEVICES")
    return _as_cuda_sees(gpus, visible, in_bus_order=os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def driver_version() -> str:
    """Of the driver that NVML has loaded."""
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown ({error})"


def _explained(error: Any) -> str:
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated and the old one is still loaded; reboot"
    if error.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
        return "the NVIDIA driver is too old for the installed nvidia-ml-py; update the driver"
    return f"{error}; see nvidia-smi"


def _gpu(index: int) -> Gpu:
    """The GPU at `index`, with its `fault` if it does not work; others may still work."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return Gpu(
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            name=pynvml.nvmlDeviceGetName(handle),
            total_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            fault=_mig_fault(index, handle),
        )
    except pynvml.NVMLError as error:
        return Gpu(f"index {index}", "unknown", 0, f"GPU {index} cannot be used: {error}; reset it or reboot")


def _mig_fault(index: int, handle: Any) -> str:
    try:
        enabled = pynvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except pynvml.NVMLError:  # most GPUs and old drivers do not have MIG
        return ""
    if not enabled:
        return ""
    return f"GPU {index} is split by MIG and ladder tunes whole GPUs; turn that off (nvidia-smi -i {index} -mig 0)"


def _as_cuda_sees(gpus: list[Gpu], visible: str | None, *, in_bus_order: bool = False) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names by index or by the start of the UUID, up to the first unknown name.

    UsageError if an index may mean another GPU to CUDA than to NVML: NVML uses the order on the bus, while CUDA by
    default puts the fastest of several models first.
    """
    if visible is None:
        return gpus
    is_ambiguous = len({gpu.name for gpu in gpus if not gpu.fault}) > 1 and not in_bus_order
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        if name.startswith("MIG-"):
            raise UsageError("CUDA_VISIBLE_DEVICES names a MIG partition, but ladder tunes whole GPUs; name those.")
        match = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if name.isascii() and name.isdecimal() and int(name) < len(gpus):
            if is_ambiguous:
                raise UsageError(
                    f"CUDA_VISIBLE_DEVICES names GPU {name} by its number, but CUDA and nvidia-smi may number GPUs of "
                    "different models differently; set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs (nvidia-smi -L)."
                )
            match = [gpus[int(name)]]
        if not match:
            break
        if match[0] in chosen:  # CUDA then shows no device at all
            raise UsageError(f"CUDA_VISIBLE_DEVICES names GPU {name} twice; name each once.")
        chosen.append(match[0])
    return chosen


def obstacle(gpu: Gpu, needed: int | None) -> Obstacle | None:
    """Why a tune cannot have `needed` bytes (None: all) of `gpu`; None if it can."""
    if gpu.fault:
        return Obstacle(gpu.fault, lasting=True)
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return Obstacle(f"GPU {gpu.uuid} ({gpu.name}) cannot be used: {error}; reset it or reboot", lasting=True)
    pids = users_of(handle)
    strangers = [pid for pid in pids if not _is_ladders(pid)]
    wanted = min(needed or gpu.total_bytes, int(0.9 * info.total))
    if not pids and info.used <= _BUSY_FRACTION * info.total and info.free >= wanted:
        return None
    who = f"is used by {', '.join(map(_named, pids))} and" if pids else "already"
    return Obstacle(
        f"GPU {gpu.uuid} ({gpu.name}) {who} holds {format_bytes(info.used)} of {format_bytes(info.total)}; end the "
        "process that uses it (see nvidia-smi), wait for it with --wait",
        passing=not strangers,  # the driver takes seconds to free the memory of a process that ended
    )


def users_of(handle: Any) -> list[int]:
    """The processes that use a GPU, as far as NVML shows them; in a container it may show none."""
    # Explicit versions: under an older driver, the name without a version raises another error.
    for query in (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetComputeRunningProcesses_v2):
        with contextlib.suppress(pynvml.NVMLError):
            return sorted({int(process.pid) for process in query(handle)})
    return []


def _named(pid: int) -> str:
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:
        return f"pid {pid}"
    return f"pid {pid} ({name})" if name.isprintable() else f"pid {pid}"


def _is_ladders(pid: int) -> bool:
    """Whether `pid` belongs to a tune of this user. Leases handle those, and the ranks of a killed tune end soon."""
    try:
        return RUN_MARKER in psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return False
