"""Small file systems with a fault of their own, where this machine lets us mount any."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, kind: str, options: str = "", source: str = "none") -> Iterator[Path]:
    """`folder` as a mount of file system `kind`; skips the test with the reason where that is not allowed."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, *(["-o", options] if options else []), source, str(folder)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode != 0:
        pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, timeout=20)


def fill(folder: Path, *, but: int = 0) -> Path:
    """Fill the file system of `folder` with one file up to the last byte, then give `but` bytes back."""
    filler = folder / "filler"
    written, piece = 0, 64 << 10
    with filler.open("wb", buffering=0) as file:
        while piece:
            try:
                written += file.write(bytes(piece))
            except OSError:
                piece //= 2
    with filler.open("r+b") as file:
        file.truncate(max(0, written - but))
    return filler
