"""Rungs without DeepSpeed in real ranks: they train as DeepSpeed's do, and save what they have trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import TINY, TINY_CONFIG, Bench, tiny_trial
from helpers.families import FAMILIES as COUNTED_MODELS
from helpers.shapes import FAMILIES as SMALL_MODELS
from safetensors.torch import load_file

from ladder.backends.plain.backend import PLAIN
from ladder.backends.plain.rungs import PLAIN_RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.events.protocol import FailedEvent, MeasuredEvent, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.launch.counting import counting
from ladder.tuning.parity import losses_of, parity_trial
from ladder.workload.lora import Lora
from ladder.workload.shapes import shape_from_config, usual_task
from ladder.workload.workload import ModelShape, Workload

ON_CPU = [rung.name for rung in PLAIN_RUNGS if not rung.devices]


def losses(bench: Bench, spec: TrialSpec, model: ModelShape = TINY) -> list[float]:
    run = bench.run(parity_trial(spec, model))
    assert not failures(run), failures(run)[0].traceback
    return losses_of(run)


def failures(run: TrialRun) -> list[FailedEvent]:
    return [event for events in run.events for event in events if isinstance(event, FailedEvent)]


@pytest.fixture(scope="module")
def of_zero1(warm_bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(warm_bench, tiny_trial(tmp_path_factory.mktemp("zero1"), 1, rung="zero1"))


@pytest.mark.parametrize("rung", ON_CPU)
def test_a_rung_without_deepspeed_trains_as_stage_1_does(
    warm_bench: Bench, tmp_path: Path, of_zero1: list[float], rung: str
) -> None:
    own = losses(warm_bench, tiny_trial(tmp_path / "0001", 1, rung=rung))
    assert own[-1] < 0.96 * own[0]
    assert own == pytest.approx(of_zero1, rel=0.005)


@pytest.mark.parametrize("rung", ON_CPU)
def test_a_head_that_shares_the_embeddings_weights_still_does_on_all_ranks(
    warm_bench: Bench, tmp_path: Path, rung: str
) -> None:
    config = TINY_CONFIG | {"tie_word_embeddings": True}
    tied = shape_from_config(config, name="tied", source="file")
    own, of_zero1 = (
        losses(
            warm_bench, tiny_trial(tmp_path / name, 1, rung=name).model_copy(update={"model_config_json": config}), tied
        )
        for name in (rung, "zero1")
    )
    assert own[-1] < 0.96 * own[0]
    assert own == pytest.approx(of_zero1, rel=0.005)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bert", SMALL_MODELS["bert"]),
        ("bert", SMALL_MODELS["bert untied"]),
        ("t5", SMALL_MODELS["mt5"] | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}),
        ("electra", COUNTED_MODELS["electra"] | {"pad_token_id": 0}),
    ],
)
def test_fsdp2_fails_with_the_models_that_it_is_not_tried_with_and_with_no_other(
    warm_bench: Bench, tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    shape = shape_from_config(config, name=name, source="file", count=counting())
    task = usual_task(shape)
    changes = {"model_config_json": config, "task": task, "seq_len": 32}
    run = warm_bench.run(tiny_trial(tmp_path / "0001", 1, rung="fsdp2").model_copy(update=changes))
    workload = Workload(model=shape, task=task, seq_len=32, global_batch_size=4)
    is_refused = "belong to two" in PLAIN.obstacle(workload, RUNGS_BY_NAME["fsdp2"])
    assert bool(failures(run)) is is_refused
    assert is_refused is (name != "electra")
    assert PLAIN.obstacle(workload, RUNGS_BY_NAME["ddp"]) == ""


@pytest.mark.parametrize("rung", ON_CPU)
def test_one_rank_trains_as_stage_1_does_too(warm_bench: Bench, tmp_path: Path, rung: str) -> None:
    own, of_zero1 = (
        losses(warm_bench, tiny_trial(tmp_path / name, 1, rung=name, ranks=1, accumulation=4))
        for name in (rung, "zero1")
    )
    assert own[-1] < 0.96 * own[0]
    assert own == pytest.approx(of_zero1, rel=0.005)


@pytest.mark.parametrize("load_in", [None, pytest.param("4bit", marks=pytest.mark.night)])
def test_adapters_train_without_deepspeed_as_at_stage_1(warm_bench: Bench, tmp_path: Path, load_in: str | None) -> None:
    def own(rung: str) -> list[float]:
        lora = Lora(rank=4).for_peft()
        return losses(warm_bench, tiny_trial(tmp_path / rung, 1, rung=rung, lora=lora, load_in=load_in))

    zero1 = own("zero1")
    for rung in ON_CPU:
        assert own(rung) == pytest.approx(zero1, rel=0.01), rung  # FSDP2's losses are in bf16


@pytest.mark.parametrize(("rung", "load_in"), [("ddp", None), ("fsdp2", None), ("fsdp2", "4bit")])
def test_a_proof_without_deepspeed_saves_and_loads_adapters_alone(
    warm_bench: Bench, tmp_path: Path, rung: str, load_in: str | None
) -> None:
    saved, lora = tmp_path / "saved", Lora(rank=4)
    spec = tiny_trial(tmp_path / "0001", 1, rung=rung, proof=True, save_folder=str(saved), lora=lora.for_peft())
    run = warm_bench.run(spec.model_copy(update={"load_in": load_in}))
    assert not failures(run), failures(run)[0].traceback
    workload = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=4, lora=lora)
    kept = load_file(saved / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in kept.values()) == workload.weights.trained


@pytest.mark.parametrize("rung", ON_CPU)
def test_a_proof_without_deepspeed_evaluates_and_saves_the_whole_weights(
    warm_bench: Bench, tmp_path: Path, rung: str
) -> None:
    saved = tmp_path / "saved"
    run = warm_bench.run(tiny_trial(tmp_path / "0001", 1, 2, rung=rung, proof=True, save_folder=str(saved)))
    assert not failures(run), failures(run)[0].traceback
    assert all(sum(isinstance(event, MeasuredEvent) for event in events) == 2 for events in run.events)
    assert sum(tensor.numel() for tensor in load_file(saved / "model.safetensors").values()) >= TINY.num_parameters
