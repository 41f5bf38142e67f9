"""torch.compile in real ranks: engines train as others do, save the whole weights, and say how long compiling took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import TINY, Bench, tiny_trial
from safetensors.torch import load_file

from ladder.events.protocol import FailedEvent, MeasuredEvent, TrialSpec
from ladder.techniques.keys import engine_named
from ladder.tuning.parity import losses_of, parity_trial
from ladder.tuning.trial_request import environment_of


def compiled_trial(folder: Path, name: str, *micro_batches: int, **changes: Any) -> TrialSpec:
    engine = engine_named(name)
    spec = tiny_trial(folder, *micro_batches, rung=engine.rung.name, **changes)
    modules = tuple(technique.rank_module for technique in engine.techniques)
    return spec.model_copy(update={"rank_modules": modules, "environment": environment_of(engine, spec.world_size)})


def measured(bench: Bench, spec: TrialSpec) -> list[MeasuredEvent]:
    run = bench.run(spec)
    failed = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    assert not failed, failed[0].traceback
    return [event for event in run.events[0] if isinstance(event, MeasuredEvent)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ddp+compile-whole", "fsdp2+compile"])
def test_a_compiled_engine_trains_as_stage_1_does(warm_bench: Bench, tmp_path: Path, name: str) -> None:
    zero1 = losses_of(warm_bench.run(parity_trial(tiny_trial(tmp_path / "zero1", 1, rung="zero1"), TINY)))
    (own,) = measured(warm_bench, parity_trial(compiled_trial(tmp_path / "own", name, 1), TINY))
    number = min(len(zero1), len(own.losses))
    assert number >= 8
    assert own.losses[:number] == pytest.approx(zero1[:number], rel=0.01)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "micro_batches"), [("ddp+compile", [1, 2]), ("fsdp2+compile", [1])])
def test_its_proof_saves_the_whole_weights_and_says_how_long_compiling_took(
    warm_bench: Bench, tmp_path: Path, name: str, micro_batches: list[int]
) -> None:
    saved = tmp_path / "saved"
    spec = compiled_trial(tmp_path / "0001", name, *micro_batches, proof=True, save_folder=str(saved))
    events = measured(warm_bench, spec)
    assert len(events) == len(micro_batches)
    for event in events:
        assert event.compile_seconds is not None
        assert max(event.boundary_seconds) < max(1.0, event.compile_seconds), "compiling is no part of a step"
    weights = load_file(saved / "model.safetensors")
    assert not any("_orig_mod" in name for name in weights)
    assert sum(tensor.numel() for tensor in weights.values()) >= TINY.num_parameters
