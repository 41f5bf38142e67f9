"""FP8 in real ranks, on CPUs, whose slow kernels round as those of GPUs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import TINY, Bench, tiny_trial
from safetensors.torch import load_file

from ladder.backends.registry import backend_of
from ladder.events.protocol import FailedEvent, MeasuredEvent, TrialSpec
from ladder.techniques.keys import engine_named
from ladder.tuning.parity import losses_of, parity_trial
from ladder.tuning.trial_request import environment_of, rank_modules_of
from ladder.workload.workload import Workload

pytest.importorskip("torchao")


def fp8_trial(folder: Path, name: str, **changes: Any) -> TrialSpec:
    engine = engine_named(name)
    workload = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=4)
    told = {
        "rank_modules": rank_modules_of(engine),
        "environment": environment_of(engine, 2),
        "deepspeed": backend_of(engine.rung).configuration(
            workload, engine, micro_batch=1, accumulation=2, world_size=2, nvme_path=None
        ),
    }
    return tiny_trial(folder, 1, rung=engine.rung.name, **changes).model_copy(update=told)


def losses(bench: Bench, spec: TrialSpec) -> list[float]:
    run = bench.run(spec)
    failed = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    assert not failed, failed[0].traceback
    assert any(isinstance(event, MeasuredEvent) for event in run.events[0])
    return losses_of(run)


@pytest.mark.parametrize("name", ["ddp+fp8", "fsdp2+fp8"])
def test_an_engine_in_fp8_trains_nearly_as_stage_1_does(warm_bench: Bench, tmp_path: Path, name: str) -> None:
    zero1 = losses(warm_bench, parity_trial(tiny_trial(tmp_path / "zero1", 1, rung="zero1"), TINY))
    own = losses(warm_bench, parity_trial(fp8_trial(tmp_path / "own", name), TINY))
    assert own[-1] < 0.96 * own[0]
    assert own == pytest.approx(zero1, rel=0.02)
    assert own != pytest.approx(zero1, rel=1e-4), "some products were computed otherwise"


def test_its_proof_saves_the_whole_weights(warm_bench: Bench, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    losses(warm_bench, fp8_trial(tmp_path / "0001", "fsdp2+fp8", proof=True, save_folder=str(saved)))
    weights = load_file(saved / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) >= TINY.num_parameters
