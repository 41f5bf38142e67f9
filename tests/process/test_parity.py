"""Loss parity with real ranks: every stage trains alike, and an engine that does not is found out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import TINY, Bench, tiny_trial

from ladder.candidates import RUNGS_BY_NAME, Engine
from ladder.protocol import TrialSpec
from ladder.tuning.parity import compare, losses_of, parity_trial


def losses(bench: Bench, folder: Path, change: Callable[[TrialSpec], TrialSpec] = lambda spec: spec, **trial: str):
    return losses_of(bench.run(change(parity_trial(tiny_trial(folder, 1, **trial), TINY))))


def with_gradients_lost(spec: TrialSpec) -> TrialSpec:
    """Clipped to nothing: an engine whose optimizer steps change nothing."""
    return spec.model_copy(update={"deepspeed": spec.deepspeed | {"gradient_clipping": 1e-12}})


def test_every_stage_trains_alike_and_an_engine_that_loses_its_steps_does_not(
    warm_bench: Bench, tmp_path: Path
) -> None:
    plain = losses(warm_bench, tmp_path / "0001", rung="zero1")
    assert plain[-1] < 0.96 * plain[0]  # so there is something to compare
    for number, rung in enumerate(("zero0", "zero2", "zero3"), start=2):
        own = losses(warm_bench, tmp_path / f"{number:04d}", rung=rung)
        assert compare(own, plain, Engine(RUNGS_BY_NAME[rung])).agrees
        assert own == pytest.approx(plain, rel=0.002)
    lost = losses(warm_bench, tmp_path / "0009", with_gradients_lost, rung="zero2")
    found = compare(lost, plain, Engine(RUNGS_BY_NAME["zero2"]))
    assert found.agrees is False
    assert "are not those of zero1" in found.sentence
