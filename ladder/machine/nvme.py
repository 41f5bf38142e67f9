"""The folder for NVMe offload: whether async I/O works there, how much space it needs, and how fast the drive is."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

from ladder.candidates import Rung
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.text import shown
from ladder.units import MIB, format_bytes
from ladder.workload.workload import Workload

_PROBE_SECONDS = 0.5
"""The longest time for the speed test. Chosen: a tune should not have to wait for it."""
_PROBE_BLOCKS = 64
"""Blocks of 1 MiB that the speed test writes. Chosen: enough to see a drive's speed, and quickly written."""
_MOVED_BYTES = 30
"""Bytes per parameter in an optimizer step, with optimizer and parameters on the drive. Derived: states, master weights
and gradients are read, states and master weights are written."""


def check_nvme_path(path: Path) -> float:
    """The write speed of `path` in bytes per second, with O_DIRECT as async I/O uses it.

    UsageError unless it is a folder on a file system with O_DIRECT, EnvironmentFaultError if it is full or cannot be
    written.
    """
    if not path.is_dir():
        raise UsageError(f"--nvme-path {shown(path)} is not a folder; create it on the NVMe drive first.")
    probe = path / f".ladder-probe-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            return _write_speed(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _explained(error, path) from None
    finally:
        # On a read-only file system, unlink fails even if there is nothing to remove.
        if probe.exists():
            probe.unlink()


def _write_speed(descriptor: int) -> float:
    began, written = time.monotonic(), 0
    with mmap.mmap(-1, MIB) as block:  # page-aligned, as O_DIRECT needs it
        for _ in range(_PROBE_BLOCKS):
            try:
                count = os.write(descriptor, block)
            except OSError as error:
                if error.errno != errno.ENOSPC or not written:
                    raise
                break  # nearly full; `nvme_shortage` compares what a rung needs with what is free
            written += count
            if count < MIB or time.monotonic() - began > _PROBE_SECONDS:
                break
        os.fdatasync(descriptor)
    return written / (time.monotonic() - began)


def _explained(error: OSError, path: Path) -> UsageError | EnvironmentFaultError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFaultError(f"--nvme-path {shown(path)} is full; free some space there or choose another.")
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return UsageError(
            f"--nvme-path {shown(path)} cannot be written with O_DIRECT ({error.strerror}); choose a folder on a "
            "local NVMe file system such as ext4 or xfs."
        )
    return EnvironmentFaultError(
        f"--nvme-path {shown(path)} cannot be written ({error.strerror}); choose a folder that you can write to."
    )


def needed_bytes(rung: Rung, workload: Workload) -> int:
    """Bytes that all ranks together need on the drive: fp32 optimizer states and 16-bit parameters."""
    optimizer = 4 + round(workload.state_bytes()) if rung.offload_optimizer == "nvme" else 0
    parameters = 2 if rung.offload_param == "nvme" else 0
    return (optimizer + parameters) * workload.model.num_parameters


def step_patience(workload: Workload) -> float:
    """Seconds that a trial waits for a step that writes states to a drive."""
    return 240 + 60 * workload.model.num_parameters / 1e9


def nvme_shortage(rung: Rung, workload: Workload, path: Path, bytes_per_second: float) -> str | None:
    """Why the drive is too full or too slow for `rung`, with figures; None if it is not."""
    if "nvme" not in rung.devices:
        return None
    needed, usage = needed_bytes(rung, workload), os.statvfs(path)
    free = usage.f_bavail * usage.f_frsize
    if needed > free:
        return f"it needs {format_bytes(needed)} on --nvme-path, where {format_bytes(free)} are free"
    moved, patience = _MOVED_BYTES * workload.model.num_parameters, step_patience(workload)
    if moved > patience * bytes_per_second:
        return (
            f"a step moves up to {format_bytes(moved)}, which takes {moved / bytes_per_second / 60:.0f} minutes at the "
            f"{bytes_per_second / MIB:.1f} MiB/s of --nvme-path, and a trial waits for {patience / 60:.0f} minutes"
        )
    return None
