"""Loss parity with real ranks: every stage trains alike, and an engine that does not is found out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, Bench, tiny_trial

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import HALF, Engine, Technique
from ladder.events.protocol import DoneEvent, MeasuredEvent, PhaseEvent, TrialSpec
from ladder.launch.operator_builds import build_operators
from ladder.techniques.adam_8bit import ADAM_8BIT, MOST_ELEMENTS
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.ulysses import ULYSSES
from ladder.techniques.unchecked_gradients import UNCHECKED_GRADIENTS
from ladder.trial.techniques import techniques_of
from ladder.tuning.parity import compare, losses_of, parity_trial
from ladder.workload.lora import Lora


def losses(bench: Bench, folder: Path, change: Callable[[TrialSpec], TrialSpec] = lambda spec: spec, **trial: Any):
    return losses_of(bench.run(change(parity_trial(tiny_trial(folder, 1, **trial), TINY))))


def half_checkpointed(spec: TrialSpec) -> TrialSpec:
    (candidate,) = spec.candidates
    return spec.model_copy(update={"candidates": (candidate.model_copy(update={"checkpoint_every": HALF}),)})


def having(spec: TrialSpec, technique: Technique) -> TrialSpec:
    config = copy.deepcopy(spec.deepspeed)
    technique.configure(config)
    return spec.model_copy(
        update={
            "deepspeed": config,
            "techniques": (technique.name,),
            "rank_modules": (technique.rank_module,) if technique.rank_module else (),
            "shares_sequences": technique.shares_sequences,
        }
    )


def states_in_bf16(spec: TrialSpec) -> TrialSpec:
    return having(spec, BF16_STATES)


def moments_in_8_bits(spec: TrialSpec) -> TrialSpec:
    return having(spec, ADAM_8BIT)


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
    assert "differ from those of zero1" in found.sentence


def with_unchecked_gradients(spec: TrialSpec) -> TrialSpec:
    return having(spec, UNCHECKED_GRADIENTS)


def test_gradients_that_are_not_checked_train_exactly_alike(warm_bench: Bench, tmp_path: Path) -> None:
    checked = losses(warm_bench, tmp_path / "0001", rung="zero2")
    assert losses(warm_bench, tmp_path / "0002", with_unchecked_gradients, rung="zero2") == checked


def test_a_comparison_is_not_cut_short_by_the_speed_of_the_best_so_far(warm_bench: Bench, tmp_path: Path) -> None:
    trial = tiny_trial(tmp_path / "0001", 1)
    behind = trial.candidates[0].model_copy(update={"beat_step_seconds": 1e-6})
    of_a_loser = losses_of(warm_bench.run(parity_trial(trial.model_copy(update={"candidates": (behind,)}), TINY)))
    assert len(of_a_loser) == len(losses(warm_bench, tmp_path / "0002"))


def test_with_half_of_its_layers_checkpointed_a_rung_trains_as_the_plain_one(warm_bench: Bench, tmp_path: Path) -> None:
    plain = losses(warm_bench, tmp_path / "0001", rung="zero1")
    half = losses(warm_bench, tmp_path / "0002", half_checkpointed, rung="zero2")
    assert half == pytest.approx(plain, rel=0.002)


def with_adapters(spec: TrialSpec) -> TrialSpec:
    return spec.model_copy(update={"lora": Lora(rank=8, alpha=16).for_peft()})


def with_adapters_in_4_bits(spec: TrialSpec) -> TrialSpec:
    return with_adapters(spec).model_copy(update={"load_in": "4bit"})


def with_a_frozen_block(spec: TrialSpec) -> TrialSpec:
    return spec.model_copy(update={"freeze": ("model.embed_tokens", "model.layers.0")})


@pytest.mark.parametrize("change", [with_adapters, with_adapters_in_4_bits, with_a_frozen_block])
def test_every_stage_trains_a_part_of_the_model_alike(
    warm_bench: Bench, tmp_path: Path, change: Callable[[TrialSpec], TrialSpec]
) -> None:
    plain = losses(warm_bench, tmp_path / "0001", change, rung="zero1")
    assert plain[-1] < 0.98 * plain[0]
    for number, rung in enumerate(("zero0", "zero2", "zero3"), start=2):
        own = losses(warm_bench, tmp_path / f"{number:04d}", change, rung=rung)
        assert compare(own, plain, Engine(RUNGS_BY_NAME[rung])).agrees


def on_the_same_data(spec: TrialSpec) -> TrialSpec:
    return spec.model_copy(update={"same_data": True})


def with_shared_sequences(spec: TrialSpec) -> TrialSpec:
    return having(spec, ULYSSES)


def test_ranks_that_share_each_sequence_train_as_ranks_that_have_the_same_one(
    warm_bench: Bench, tmp_path: Path
) -> None:
    plain = losses(warm_bench, tmp_path / "0001", on_the_same_data, rung="zero1")
    own = losses(warm_bench, tmp_path / "0002", with_shared_sequences, rung="zero3")
    assert plain[-1] < 0.96 * plain[0]
    assert own == pytest.approx(plain, rel=0.002)


def in_proportion(spec: TrialSpec) -> TrialSpec:
    """With steps as long as the gradient is, which those of Adam and clipped ones are not."""
    config = spec.deepspeed | {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    return spec.model_copy(update={"optimizer": "sgd", "deepspeed": config})


def test_the_gradient_of_a_shared_sequence_is_as_large_as_that_of_a_whole_one_and_so_at_stage_3_alone(
    warm_bench: Bench, tmp_path: Path
) -> None:
    plain = losses(warm_bench, tmp_path / "0001", lambda spec: in_proportion(on_the_same_data(spec)), rung="zero1")
    at_3 = losses(warm_bench, tmp_path / "0002", lambda spec: in_proportion(with_shared_sequences(spec)), rung="zero3")
    at_1 = losses(warm_bench, tmp_path / "0003", lambda spec: in_proportion(with_shared_sequences(spec)), rung="zero1")
    fall, fall_at_3, fall_at_1 = (each[0] - each[-1] for each in (plain, at_3, at_1))
    assert fall_at_3 == pytest.approx(fall, rel=0.02)
    assert fall_at_1 > 1.5 * fall  # what DeepSpeed does there, and why nothing is shared below stage 3


def test_ranks_that_share_sequences_are_proven_with_an_evaluation_of_a_part_and_whole_weights(
    warm_bench: Bench, tmp_path: Path
) -> None:
    trial = with_shared_sequences(tiny_trial(tmp_path / "0001", 1, rung="zero3", proof=True))
    run = warm_bench.run(trial.model_copy(update={"save_folder": str(tmp_path)}))
    for events in run.events:
        assert isinstance(events[-1], DoneEvent)
        assert {"evaluation", "gather"} <= {event.phase for event in events if isinstance(event, PhaseEvent)}
    first, second = (next(event for event in events if isinstance(event, MeasuredEvent)) for events in run.events)
    assert first.losses == second.losses
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert sum(weight.numel() for weight in weights.values()) == TINY.num_parameters


def test_losses_of_ranks_that_each_attend_to_their_part_alone_are_found_out(warm_bench: Bench, tmp_path: Path) -> None:
    """Half as long a sequence, which is what a rank sees of it that does not exchange its heads."""

    def halved(spec: TrialSpec) -> TrialSpec:
        return on_the_same_data(spec).model_copy(update={"seq_len": spec.seq_len // 2})

    plain = losses(warm_bench, tmp_path / "0001", on_the_same_data, rung="zero1")
    part = losses(warm_bench, tmp_path / "0002", halved, rung="zero1")
    assert part != pytest.approx(plain, rel=0.002)


@pytest.mark.parametrize("numerics", [states_in_bf16, moments_in_8_bits])
def test_what_is_allowed_trains_otherwise_than_the_plain_rung_and_as_the_plain_rung_with_it(
    numerics: Callable[[TrialSpec], TrialSpec], warm_bench: Bench, tmp_path: Path
) -> None:
    usual = losses(warm_bench, tmp_path / "0001", rung="zero1")
    plain = losses(warm_bench, tmp_path / "0002", numerics, rung="zero1")
    assert plain != usual  # or nothing was switched
    assert plain == pytest.approx(usual, rel=0.02)
    for number, rung in enumerate(("zero2", "zero3"), start=3):
        own = losses(warm_bench, tmp_path / f"{number:04d}", numerics, rung=rung)
        assert own == pytest.approx(plain, rel=0.002)


def test_a_tensor_that_bitsandbytes_would_leave_mostly_as_it_is_is_refused(tmp_path: Path) -> None:
    (technique,) = techniques_of(moments_in_8_bits(tiny_trial(tmp_path, 1)))
    for length in (MOST_ELEMENTS - 1, MOST_ELEMENTS):
        optimizer = torch.optim.SGD([torch.empty(length, device="meta", requires_grad=True)])
        with pytest.raises(RuntimeError, match="2,147,483,648 elements") if length == MOST_ELEMENTS else nullcontext():
            technique.check_optimizer(optimizer)


def test_with_sgd_an_engine_that_loses_its_steps_is_found_out_too(warm_bench: Bench, tmp_path: Path) -> None:
    def losses_with_sgd(
        number: str, rung: str, change: Callable[[TrialSpec], TrialSpec] = lambda spec: spec
    ) -> list[float]:
        spec = tiny_trial(tmp_path / number, 1, rung=rung)
        config = spec.deepspeed | {"zero_allow_untested_optimizer": True}
        spec = parity_trial(spec.model_copy(update={"optimizer": "sgd", "deepspeed": config}), TINY)
        return losses_of(warm_bench.run(change(spec)))

    plain = losses_with_sgd("0001", "zero1")
    own, lost = losses_with_sgd("0002", "zero3"), losses_with_sgd("0003", "zero2", with_gradients_lost)
    assert compare(own, plain, Engine(RUNGS_BY_NAME["zero3"])).agrees is True
    assert compare(lost, plain, Engine(RUNGS_BY_NAME["zero2"])).agrees is False


@pytest.mark.timeout(900)
def test_an_optimizer_on_the_host_trains_alike_whether_gradients_cross_at_each_micro_step_or_at_the_boundary(
    warm_bench: Bench, trial_environment: dict[str, str], tmp_path: Path
) -> None:
    assert build_operators(["cpu_adam"], trial_environment) == {"cpu_adam": None}  # two ranks at once might fail
    plain = losses(warm_bench, tmp_path / "0001", rung="zero1")
    for number, rung in enumerate(("zero1+opt-cpu", "zero2+opt-cpu"), start=2):
        own = losses(warm_bench, tmp_path / f"{number:04d}", rung=rung)
        assert own == pytest.approx(plain, rel=0.002)
