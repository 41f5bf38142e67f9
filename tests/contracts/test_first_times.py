"""What torch and Triton say of compilations and of memory, as a proof asks them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from ladder.machine.gpus import visible_gpus
from ladder.trial.first_times import FirstTimes
from ladder.units import MIB

needs_gpu = pytest.mark.skipif(not visible_gpus(), reason="needs a CUDA GPU")


def test_what_torch_compiles_anew_is_noticed_once() -> None:
    @torch.compile(backend="eager", dynamic=False)
    def doubled(numbers: torch.Tensor) -> torch.Tensor:
        return 2 * numbers

    firsts = FirstTimes()
    for length in (3, 4):
        doubled(torch.ones(length))
        assert firsts.any_since(), "another length is compiled anew"
        doubled(torch.ones(length))
        assert not firsts.any_since()


def test_memory_is_noticed_when_it_is_reserved_unless_some_was_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"reserved_bytes.all.allocated": MIB, "reserved_bytes.all.freed": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    firsts = FirstTimes()
    assert not firsts.any_since()
    stats["reserved_bytes.all.allocated"] += MIB
    assert firsts.any_since()
    assert not firsts.any_since()
    stats.update({"reserved_bytes.all.allocated": 3 * MIB, "reserved_bytes.all.freed": MIB})
    assert not firsts.any_since()


@needs_gpu
def test_memory_of_a_real_gpu_is_noticed_when_it_is_reserved() -> None:
    torch.cuda.empty_cache()
    firsts = FirstTimes()
    kept = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert firsts.any_since()
    del kept
    torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    assert not firsts.any_since(), "the allocator kept it"


@needs_gpu
def test_what_triton_compiles_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    tl = importlib.import_module("triton.language")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    @triton.jit
    def filled(at, value):
        tl.store(at, value)

    numbers = torch.zeros(1, device="cuda")
    firsts = FirstTimes()
    filled[(1,)](numbers, 2.0)
    assert firsts.any_since()
    filled[(1,)](numbers, 3.0)
    assert not firsts.any_since()
