"""How fast a drive is read past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from ladder.errors import EnvironmentFaultError
from ladder.text import shown
from ladder.units import MIB

_BLOCKS = 64
"""Of 1 MiB each. Chosen: enough to see a drive's speed, and soon written on a slow one."""
_SECONDS = 0.5
"""A slow drive is read no longer. Chosen: `ladder doctor` should answer at once."""


def read_speed(folder: Path) -> float:
    """Bytes a second that a file in `folder` gives with O_DIRECT. EnvironmentFaultError where that cannot be done."""
    probe = folder / f".ladder-probe-{os.getpid()}"
    try:
        with mmap.mmap(-1, MIB) as block:  # page-aligned, as O_DIRECT wants it
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
