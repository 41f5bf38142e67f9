"""The cases of benchmarks/search.py: machines drawn by their number, with all weights trained or adapters."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def search_cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return pytest.importorskip("search_cases")


def test_adapters_are_drawn_for_the_same_machines_and_models(search_cases: ModuleType) -> None:
    whole, adapted = (
        list(search_cases.simulated_cases(4, first=3000, adapters=adapters)) for adapters in (False, True)
    )
    kinds = set()
    for plain, adapters in zip(whole, adapted, strict=True):
        for one, other in zip(plain, adapters, strict=True):
            assert one.workload.weights.is_whole
            assert (one.machine, one.workload.model) == (other.machine, other.workload.model)
            assert one.workload.global_batch_size == other.workload.global_batch_size
            assert other.workload.lora.rank in search_cases.RANKS
            kinds.add(other.workload.load_in)
    assert "4bit" in kinds


def test_a_case_knows_the_true_speed_of_every_candidate_that_fits(search_cases: ModuleType) -> None:
    for adapters in (False, True):
        case, *_ = next(search_cases.simulated_cases(1, first=3000, adapters=adapters))
        needed, speeds = case.device_bytes(), case.speeds()
        assert 0 < len(speeds) < len(needed)
        assert all(needed[key] <= case.machine.memory_limit for key in speeds)
