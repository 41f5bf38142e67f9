"""The most that a rank held of the host's memory: of its own, and not of files that it has mapped."""

from __future__ import annotations

import mmap
from pathlib import Path

from ladder.trial.host_memory import HostMemory
from ladder.units import MIB

LOADED = 64 * MIB
ELSEWHERE = 16 * MIB
"""What the process itself may take or give back meanwhile."""


def test_memory_that_was_given_back_counts_at_the_peak_only() -> None:
    memory = HostMemory()
    before = memory.held()
    weights = bytearray(b"x") * LOADED
    memory.note()
    del weights
    assert memory.held() < before + ELSEWHERE
    assert memory.peak() > before + LOADED - ELSEWHERE


def test_a_file_that_was_mapped_is_no_memory_that_the_host_must_have(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * LOADED)
    memory = HostMemory()
    before = memory.held()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as weights:
        assert sum(weights[:: mmap.PAGESIZE]) > 0
        assert memory.held() > before + LOADED - ELSEWHERE
        memory.note()
    assert memory.peak() < before + ELSEWHERE
