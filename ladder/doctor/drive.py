"""Measures the read speed of a drive without the page cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from ladder.errors import EnvironmentFaultError
from ladder.text import shown
from ladder.units import MIB

_BLOCKS = 64
"""Blocks of 1 MiB. Chosen: enough to see a drive's speed, and quickly written even on a slow one."""
_SECONDS = 0.5
"""The longest time for reading. Chosen: `ladder doctor` should answer quickly."""


def read_speed(folder: Path) -> float:
    """Read speed of a file in `folder` with O_DIRECT, in bytes per second. EnvironmentFaultError if it fails."""
    probe = folder / f".ladder-probe-{os.getpid()}"
    try:
        with mmap.mmap(-1, MIB) as block:  # page-aligned, as O_DIRECT needs it
            _fill(probe, block)
            descriptor = os.open(probe, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                began, done = time.monotonic(), 0
                while (count := os.readv(descriptor, [block])) and time.monotonic() - began < _SECONDS:
                    done += count
                return done / (time.monotonic() - began)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise EnvironmentFaultError(f"{shown(folder)} cannot be read with O_DIRECT ({error.strerror}).") from None
    finally:
        probe.unlink(missing_ok=True)


def _fill(probe: Path, block: mmap.mmap) -> None:
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(_BLOCKS):
            os.write(descriptor, block)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
