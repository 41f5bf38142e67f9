"""Detects the machine: GPUs or CPU ranks, memory limits, host memory, NVMe path, and rungs that cannot work."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ladder.candidates import Rung
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.machine.described import Gpu, Machine, memory_of_cpu_rank
from ladder.machine.gpus import allocator_settings, obstacle, visible_gpus
from ladder.machine.host import compiler, usable_cores
from ladder.machine.host import host_memory as all_host_memory
from ladder.machine.interpreter import program_found
from ladder.units import format_bytes

CPU_RANKS = 2
"""Ranks on a machine without GPUs. Chosen: the fewest with which ZeRO partitions something."""

Choice = Callable[[Sequence[Gpu], int, int | None], Sequence[Gpu]]
"""Chooses from the visible GPUs: how many are wanted, and how many bytes each must have free (None: all)."""


def free_gpus(visible: Sequence[Gpu], count: int, needed: int | None) -> Sequence[Gpu]:
    """The first `count` GPUs that nobody uses. If there are fewer, EnvironmentFaultError says why."""
    in_the_way = {gpu: obstacle(gpu, needed) for gpu in visible}
    chosen = [gpu for gpu, found in in_the_way.items() if found is None][:count]
    if len(chosen) < count:
        sentence = next(found.sentence for found in in_the_way.values() if found is not None)
        raise EnvironmentFaultError(f"{sentence}, or choose other GPUs with CUDA_VISIBLE_DEVICES.")
    return chosen


def detect_machine(
    *,
    gpus: int | None,
    gpu_memory: int | None,
    host_memory: int | None,
    nvme_path: Path | None,
    choose: Choice = free_gpus,
) -> Machine:
    """This machine, limited to what the user allows; sizes in bytes.

    `gpus` is None for all visible ones, 0 for CPU ranks. UsageError if more is asked for than there is; also raises
    what `choose` raises for GPUs that are in use or do not work.
    """
    found = visible_gpus() if gpus != 0 else []
    if gpus and len(found) < gpus:
        raise UsageError(
            f"--gpus {gpus} asks for more GPUs than the {len(found)} visible here; "
            f"use --gpus {len(found)}{' (CPU)' if not found else ''} or check CUDA_VISIBLE_DEVICES and nvidia-smi."
        )
    largest = max((gpu.total_bytes for gpu in found), default=0)
    if found and gpu_memory and gpu_memory > largest > 0:
        raise UsageError(
            f"--gpu-memory {format_bytes(gpu_memory)} is more than the GPUs have ({format_bytes(largest)}); lower it."
        )
    chosen = tuple(choose(found, gpus or len(found), gpu_memory)) if found else ()
    host = host_memory or all_host_memory()
    world_size = len(chosen) or CPU_RANKS
    size = min((gpu.total_bytes for gpu in chosen), default=memory_of_cpu_rank(host, world_size))
    if chosen and gpu_memory and gpu_memory > size:
        raise UsageError(
            f"--gpu-memory {format_bytes(gpu_memory)} is more than the GPUs have ({format_bytes(size)}); lower it."
        )
    return Machine(
        device="cuda" if chosen else "cpu",
        world_size=world_size,
        gpus=chosen,
        memory_limit=gpu_memory or size,
        host_memory=host,
        num_cores=usable_cores(),
        nvme_path=nvme_path,
        allocator=allocator_settings(os.environ),
    )


def unsupported_reason(rung: Rung, machine: Machine, operators: Sequence[str]) -> str | None:
    """Why `rung`, which needs these operators of DeepSpeed, cannot work on this machine, as far as is known before
    anything is built; None if it may.
    """
    if machine.device == "cpu" and "cpu" in rung.devices:
        return "CPU ranks have everything in host memory already"
    if "nvme" in rung.devices:
        if machine.nvme_path is None:
            return "no --nvme-path was given"
        if ctypes.util.find_library("aio") is None:
            return "libaio is missing (Debian and Ubuntu: apt-get install libaio-dev)"
    if operators and program_found(compiler()) is None:
        return "no C++ compiler to build DeepSpeed's operators (Debian and Ubuntu: apt-get install g++)"
    return None
