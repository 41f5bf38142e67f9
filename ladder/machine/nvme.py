"""The folder for NVMe offload: whether async I/O can work there, what it takes, and how fast it is."""

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
"""A slow drive is written to no longer. Chosen: a tune should not wait for this look."""
_PROBE_BLOCKS = 64
"""Of 1 MiB each. Chosen: enough to see a drive's speed, and soon written."""
_OPTIMIZER_BYTES = {"adamw": 12, "adam": 12, "sgd": 4}
_MOVED_BYTES = 30
"""For a parameter in one optimizer step, with optimizer and parameters on the drive. Derived: states, master weights
and gradients are read, states and master weights written."""


def check_nvme_path(path: Path) -> float:
    """Bytes a second that `path` takes with O_DIRECT, as async I/O writes.

    Raises UsageError unless it is a folder whose file system has O_DIRECT, EnvironmentFaultError for one that is full
    or cannot be written.
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
        # A read-only file system says so even where there is nothing to remove.
        if probe.exists():
            probe.unlink()


def _write_speed(descriptor: int) -> float:
    began, written = time.monotonic(), 0
    with mmap.mmap(-1, MIB) as block:  # page-aligned, as O_DIRECT wants it
        for _ in range(_PROBE_BLOCKS):
            try:
                count = os.write(descriptor, block)
            except OSError as error:
                if error.errno != errno.ENOSPC or not written:
                    raise
                break  # nearly full: what each rung needs is compared with what is free
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
        f"--nvme-path {shown(path)} cannot be written ({error.strerror}); choose a folder that is yours to write."
    )


def needed_bytes(rung: Rung, workload: Workload) -> int:
    """What all ranks together keep on the drive: fp32 states of the optimizer, 16-bit parameters."""
    optimizer = _OPTIMIZER_BYTES[workload.optimizer] if rung.offload_optimizer == "nvme" else 0
    parameters = 2 if rung.offload_param == "nvme" else 0
    return (optimizer + parameters) * workload.model.num_parameters


def step_patience(workload: Workload) -> float:
    """Seconds that a trial waits for a step that moves states to a drive."""
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
            f"a step moves up to {format_bytes(moved)} and --nvme-path takes {bytes_per_second / MIB:.1f} MiB/s: "
            f"{moved / bytes_per_second / 60:.0f} minutes, where a trial waits {patience / 60:.0f}"
        )
    return None
