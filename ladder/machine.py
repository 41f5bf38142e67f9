"""What a tune runs on: the GPUs or CPU ranks, their memory limits, host memory, NVMe path, and what is missing."""

from __future__ import annotations

import ctypes.util
import mmap
import os
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from ladder.candidates import Rung
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.units import format_bytes
from ladder.workload import OptimizerName

CPU_RANKS = 2
"""Ranks on a machine without GPUs: the fewest with which ZeRO partitions anything."""
_UNLIMITED = 1 << 60
_BUSY_FRACTION = 0.10


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as the tune may use it."""

    device: Literal["cuda", "cpu"]
    world_size: int
    gpus: tuple[Gpu, ...] = ()
    memory_limit: int
    """Bytes each rank may hold in all: on a GPU as NVML sees it, on CPU above its data segment at the start."""
    host_memory: int
    """Bytes of host memory all ranks may hold together."""
    num_cores: int
    nvme_path: Path | None = None
    unsupported: dict[str, str] = field(default_factory=dict)
    """By rung name: why it cannot work here."""

    @property
    def gpu_name(self) -> str | None:
        return self.gpus[0].name if self.gpus else None

    @property
    def host_threads(self) -> int:
        """Threads a rank gets for work on the host."""
        return max(1, self.num_cores // self.world_size)


def detect_machine(
    *, gpus: int | None, gpu_memory: int | None, host_memory: int | None, nvme_path: Path | None
) -> Machine:
    """The machine at hand, held to what the user allows; sizes in bytes.

    `gpus` is None for all visible ones, 0 for CPU ranks. Raises UsageError for more than there are, and
    EnvironmentFaultError for a GPU that somebody already uses.
    """
    found = visible_gpus() if gpus != 0 else []
    if gpus and len(found) < gpus:
        raise UsageError(
            f"--gpus {gpus} asks for more GPUs than the {len(found)} visible here; "
            f"use --gpus {len(found)}{' (CPU)' if not found else ''} or check CUDA_VISIBLE_DEVICES and nvidia-smi."
        )
    chosen = tuple(found[: gpus or len(found)])
    host = host_memory or _host_memory()
    world_size = len(chosen) or CPU_RANKS
    size = min((gpu.total_bytes for gpu in chosen), default=int(0.8 * host / world_size))
    if chosen and gpu_memory and gpu_memory > size:
        raise UsageError(f"--gpu-memory {format_bytes(gpu_memory)} is more than the GPUs have ({format_bytes(size)}).")
    for gpu in chosen:
        _require_free(gpu, gpu_memory or size)
    return Machine(
        device="cuda" if chosen else "cpu",
        world_size=world_size,
        gpus=chosen,
        memory_limit=gpu_memory or size,
        host_memory=host,
        num_cores=len(os.sched_getaffinity(0)),
        nvme_path=nvme_path,
    )


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA would show, in its order; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    gpus = [
        Gpu(
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            name=pynvml.nvmlDeviceGetName(handle),
            total_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        )
        for handle in handles
    ]
    return _as_cuda_sees(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _as_cuda_sees(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """CUDA_VISIBLE_DEVICES names GPUs by index or by the start of the UUID; the first unknown one ends the list."""
    if visible is None:
        return gpus
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        if name.startswith("MIG-"):
            raise UsageError("CUDA_VISIBLE_DEVICES names a MIG partition; ladder tunes whole GPUs, name those.")
        match = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if name.isascii() and name.isdecimal() and int(name) < len(gpus):
            match = [gpus[int(name)]]
        if not match:
            break
        if match[0] in chosen:  # CUDA shows no device at all then
            raise UsageError(f"CUDA_VISIBLE_DEVICES names GPU {name} twice; name each once.")
        chosen.append(match[0])
    return chosen


def _require_free(gpu: Gpu, needed: int) -> None:
    import pynvml

    info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    if info.used > _BUSY_FRACTION * info.total or info.free < min(needed, int(0.9 * info.total)):
        raise EnvironmentFaultError(
            f"GPU {gpu.uuid} ({gpu.name}) already holds {format_bytes(info.used)} of {format_bytes(info.total)}; end "
            "what uses it (nvidia-smi shows it) or choose other GPUs with CUDA_VISIBLE_DEVICES."
        )


def _host_memory() -> int:
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


def unsupported_reason(rung: Rung, machine: Machine) -> str | None:
    """Why `rung` cannot work on this machine, before anything is built; None if it may."""
    if machine.device == "cpu" and "cpu" in rung.devices:
        return "on the CPU device everything is in host memory already"
    if "nvme" in rung.devices:
        if machine.nvme_path is None:
            return "no --nvme-path was given"
        if ctypes.util.find_library("aio") is None:
            return "libaio is missing (Debian and Ubuntu: apt-get install libaio-dev)"
    if operators_of(rung, machine, "adamw") and shutil.which(_compiler()) is None:
        return "no C++ compiler to build DeepSpeed's operators (Debian and Ubuntu: apt-get install g++)"
    return None


def _compiler() -> str:
    """The program CXX names, which may be a command with arguments."""
    words = [word for word in shlex.split(os.environ.get("CXX", "")) if not word.startswith("-")]
    return words[-1] if words else "g++"


def operators_of(rung: Rung, machine: Machine, optimizer: OptimizerName) -> tuple[str, ...]:
    """The DeepSpeed operators `rung` needs built, by our names for them."""
    names = []
    if "nvme" in rung.devices:
        names.append("async_io")
    if rung.offload_optimizer != "none" and optimizer != "sgd":
        names.append("cpu_adam")
    return tuple(names)


def check_nvme_path(path: Path) -> None:
    """Raises UsageError unless `path` is a writable folder whose file system takes O_DIRECT, which async I/O needs."""
    if not path.is_dir():
        raise UsageError(f"--nvme-path {path} is not a folder; create it on the NVMe drive first.")
    probe = path / f".ladder-probe-{os.getpid()}"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, 4096) as page:  # page-aligned, as O_DIRECT wants it
                os.write(fd, page)
        finally:
            os.close(fd)
    except OSError as error:
        raise UsageError(
            f"--nvme-path {path} cannot be written with O_DIRECT ({error.strerror}); choose a folder on a local NVMe "
            "file system such as ext4 or xfs."
        ) from None
    finally:
        probe.unlink(missing_ok=True)
