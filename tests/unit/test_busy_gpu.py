"""Which GPUs a tune may take: those that nobody uses, as far as memory shows it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ladder.machine import gpus
from ladder.machine.described import Gpu
from ladder.machine.gpus import obstacle
from ladder.units import GIB

GPU = Gpu("GPU-1", "NVIDIA A100", 80 * GIB)
NEEDED = 10 * GIB


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A driver that shows no process, as inside a container, and a share of the memory in use."""
    used = int(request.param * GPU.total_bytes)
    info = SimpleNamespace(total=GPU.total_bytes, used=used, free=GPU.total_bytes - used)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByUUID", lambda uuid: "handle")
    monkeypatch.setattr("pynvml.nvmlDeviceGetMemoryInfo", lambda handle: info)
    monkeypatch.setattr(gpus, "_users", lambda handle: [])


@pytest.mark.parametrize("holding", [0.0, 0.05], indirect=True)
@pytest.mark.usefixtures("holding")
def test_a_gpu_that_holds_next_to_nothing_is_free() -> None:
    assert obstacle(GPU, NEEDED) is None


@pytest.mark.parametrize("holding", [0.2, 0.5], indirect=True)
@pytest.mark.usefixtures("holding")
def test_a_gpu_that_holds_a_fifth_is_somebody_s_even_if_no_process_shows_and_enough_is_free() -> None:
    found = obstacle(GPU, NEEDED)
    assert found is not None
    assert "already holds" in found.sentence
