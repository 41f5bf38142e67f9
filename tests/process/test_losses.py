"""Loss parity with real ranks: every engine trains as ZeRO's stage 1 does, and one that does not is found out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TINY, Bench, tiny_trial
from helpers.engines import engine_trial, measured

from ladder.candidates import HALF
from ladder.events.protocol import TrialSpec
from ladder.launch.operator_builds import build_operators
from ladder.optimizers.registry import OPTIMIZERS
from ladder.techniques.adam_8bit import MOST_ELEMENTS
from ladder.techniques.keys import engine_named
from ladder.trial.techniques import techniques_of
from ladder.tuning.parity import compare, parity_trial
from ladder.workload.lora import Lora

Change = Callable[[TrialSpec], TrialSpec]
Losses = Callable[..., list[float]]

STAGES = ("zero0", "zero2", "zero3")
PLAIN = ("ddp", "fsdp2", "fsdp2+no-reshard+divided-gradients")
NODES: dict[str, int] = {"ranks": 4, "accumulation": 3}
"""As on two nodes of two ranks; a node's copies of the weights are filled in the first of three micro-steps."""
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


@pytest.fixture(scope="module")
def losses(warm_bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of an engine after changes to its trial; each trial runs once for all tests."""

    @cache
    def losses_of(engine: str, *changes: Change, **ranks: int) -> list[float]:
        spec = parity_trial(engine_trial(tmp_path_factory.mktemp("losses") / "0001", engine, **ranks), TINY)
        for change in changes:
            spec = change(spec)
        ((found,), *_) = measured(warm_bench.run(spec))
        return found.losses

    return losses_of


def changed(**changes: Any) -> Change:
    return lambda spec: replace(spec, **changes)


def configured(**settings: Any) -> Change:
    return lambda spec: replace(spec, deepspeed=spec.deepspeed | settings)


def half_checkpointed(spec: TrialSpec) -> TrialSpec:
    (candidate,) = spec.candidates
    return replace(spec, candidates=(replace(candidate, checkpoint_every=HALF),))


def with_a_tied_head(spec: TrialSpec) -> TrialSpec:
    return replace(spec, model_config_json=spec.model_config_json | {"tie_word_embeddings": True})


def with_sgd(spec: TrialSpec, clipping: float = 1.0) -> TrialSpec:
    config = spec.deepspeed | {"gradient_clipping": clipping, "zero_allow_untested_optimizer": True}
    return replace(spec, optimizer="sgd", optimizer_module=OPTIMIZERS["sgd"].rank_module, deepspeed=config)


def in_proportion(spec: TrialSpec) -> TrialSpec:
    """With steps as long as the gradient is, which those of Adam and clipped ones are not."""
    return with_sgd(spec, clipping=0.0)


def with_copies_read(spec: TrialSpec) -> TrialSpec:
    """Nothing stays gathered, so that every use reads the node's copies."""
    few = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), 0)
    zero = spec.deepspeed["zero_optimization"] | few | {"stage3_param_persistence_threshold": 0}
    return configured(zero_optimization=zero)(spec)


with_gradients_lost = configured(gradient_clipping=1e-12)
"""Clipped to nothing: an engine whose optimizer steps change nothing."""
with_adapters = changed(lora=Lora(rank=8, alpha=16).for_peft())
with_adapters_in_4_bits = changed(lora=Lora(rank=8, alpha=16).for_peft(), load_in="4bit")
with_a_frozen_block = changed(freeze=("model.embed_tokens", "model.layers.0"))
on_the_same_data = changed(same_data=True)
on_half_of_the_sequence = changed(seq_len=32)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "changes", "within"),
    [
        *((stage, (), 0.002) for stage in STAGES),
        ("zero2", (half_checkpointed,), 0.002),
        *((plain, (), 0.005) for plain in PLAIN),
        # test_proofs.py compiles blocks
        *(pytest.param(name, (), 0.01, marks=pytest.mark.night) for name in ("ddp+compile-whole", "fsdp2+compile")),
        *(pytest.param(name, (), 0.02, marks=needs_torchao) for name in ("ddp+fp8", "fsdp2+fp8")),
    ],
)
def test_an_engine_trains_as_stage_1_does(losses: Losses, engine: str, changes: Any, within: float) -> None:
    plain, own = losses("zero1"), losses(engine, *changes)
    assert len(plain) >= 8
    assert plain[-1] < 0.96 * plain[0]  # so there is something to compare
    assert compare(own, plain, engine_named(engine)).agrees
    assert own[: len(plain)] == pytest.approx(plain, rel=within)
    if "fp8" in engine:
        assert own != pytest.approx(plain, rel=1e-4), "some products were computed otherwise"


@pytest.mark.parametrize("changes", [(), (with_sgd,)], ids=["adamw", "sgd"])
def test_an_engine_that_loses_its_steps_is_found_out(losses: Losses, changes: Any) -> None:
    plain, zero2 = losses("zero1", *changes), engine_named("zero2")
    assert compare(losses("zero3", *changes), plain, engine_named("zero3")).agrees is True
    found = compare(losses("zero2", *changes, with_gradients_lost), plain, zero2)
    assert found.agrees is False
    assert "differ from those of zero1" in found.sentence


def test_gradients_that_are_not_checked_train_exactly_alike(losses: Losses) -> None:
    assert losses("zero2+unchecked-gradients") == losses("zero2")


def test_a_comparison_is_not_cut_short_by_the_speed_of_the_best_so_far(
    warm_bench: Bench, losses: Losses, tmp_path: Path
) -> None:
    trial = tiny_trial(tmp_path / "0001", 1)
    behind = replace(trial.candidates[0], beat_step_seconds=1e-6)
    ((loser,), _) = measured(warm_bench.run(parity_trial(replace(trial, candidates=(behind,)), TINY)))
    assert len(loser.losses) == len(losses("zero2"))


@pytest.mark.parametrize(
    ("change", "engines"),
    [
        (with_adapters, STAGES),
        (with_adapters, PLAIN),
        (with_adapters_in_4_bits, STAGES),
        pytest.param(with_adapters_in_4_bits, PLAIN, marks=pytest.mark.night),
        (with_a_frozen_block, STAGES),
    ],
    ids=["adapters", "adapters without DeepSpeed", "in 4 bits", "in 4 bits without DeepSpeed", "a frozen block"],
)
def test_every_engine_trains_a_part_of_the_model_alike(
    losses: Losses, change: Change, engines: tuple[str, ...]
) -> None:
    plain = losses("zero1", change)
    assert plain[-1] < 0.98 * plain[0]
    for engine in engines:
        own = losses(engine, change)
        assert compare(own, plain, engine_named(engine)).agrees, engine
        assert own == pytest.approx(plain, rel=0.01), engine  # FSDP2's losses are in bf16


@pytest.mark.parametrize("engine", PLAIN[:2])
def test_a_head_that_shares_the_embeddings_weights_still_does_on_all_ranks(losses: Losses, engine: str) -> None:
    own = losses(engine, with_a_tied_head)
    assert own[-1] < 0.96 * own[0]
    assert own == pytest.approx(losses("zero1", with_a_tied_head), rel=0.005)


@pytest.mark.parametrize("engine", PLAIN[:2])
def test_one_rank_trains_as_stage_1_does_too(losses: Losses, engine: str) -> None:
    own = losses(engine, ranks=1, accumulation=4)
    assert own[-1] < 0.96 * own[0]
    assert own == pytest.approx(losses("zero1", ranks=1, accumulation=4), rel=0.005)


def test_ranks_that_share_each_sequence_train_as_ranks_that_have_the_same_one(losses: Losses) -> None:
    plain = losses("zero1", on_the_same_data)
    assert plain[-1] < 0.96 * plain[0]
    assert losses("zero3+ulysses") == pytest.approx(plain, rel=0.002)
    # Half as long a sequence is what a rank sees of it that does not exchange its heads.
    assert losses("zero1", on_the_same_data, on_half_of_the_sequence) != pytest.approx(plain, rel=0.002)


def test_the_gradient_of_a_shared_sequence_is_as_large_as_that_of_a_whole_one_and_so_at_stage_3_alone(
    losses: Losses,
) -> None:
    plain = losses("zero1", on_the_same_data, in_proportion)
    at_3, at_1 = losses("zero3+ulysses", in_proportion), losses("zero1+ulysses", in_proportion)
    fall, fall_at_3, fall_at_1 = (each[0] - each[-1] for each in (plain, at_3, at_1))
    assert fall_at_3 == pytest.approx(fall, rel=0.02)
    assert fall_at_1 > 1.5 * fall  # what DeepSpeed does there, and why nothing is shared below stage 3


@pytest.mark.parametrize("numerics", ["bf16-states", "adam-8bit"])
def test_what_is_allowed_trains_otherwise_than_the_plain_rung_and_as_the_plain_rung_with_it(
    losses: Losses, numerics: str
) -> None:
    usual, plain = losses("zero1"), losses(f"zero1+{numerics}")
    assert plain != usual  # or nothing was switched
    assert plain == pytest.approx(usual, rel=0.02)
    for rung in ("zero2", "zero3"):
        assert losses(f"{rung}+{numerics}") == pytest.approx(plain, rel=0.002)


def test_a_tensor_that_bitsandbytes_would_leave_mostly_as_it_is_is_refused(tmp_path: Path) -> None:
    (technique,) = techniques_of(engine_trial(tmp_path, "zero2+adam-8bit"))
    for length in (MOST_ELEMENTS - 1, MOST_ELEMENTS):
        optimizer = torch.optim.SGD([torch.empty(length, device="meta", requires_grad=True)])
        with pytest.raises(RuntimeError, match="2,147,483,648 elements") if length == MOST_ELEMENTS else nullcontext():
            technique.check_optimizer(optimizer)


@pytest.mark.parametrize("changes", [pytest.param((), marks=pytest.mark.night), (with_copies_read,)])
def test_with_a_copy_of_the_weights_in_each_node_stage_3_trains_as_the_plain_rung(losses: Losses, changes: Any) -> None:
    assert losses("zero3+hpz=2", *changes, **NODES) == pytest.approx(losses("zero1", **NODES), rel=0.002)


def test_a_rank_knows_that_the_first_micro_step_with_copies_is_unlike_the_others(tmp_path: Path) -> None:
    (technique,) = techniques_of(engine_trial(tmp_path, "zero3+hpz=2", **NODES))
    assert technique.first_differs is engine_named("zero3+hpz=2").first_differs is True


@pytest.mark.night
def test_adapters_train_alike_where_the_copies_of_frozen_weights_stay(losses: Losses) -> None:
    usual, own = (losses(engine, with_adapters, **NODES) for engine in ("zero1", "zero3+hpz=2"))
    assert compare(own, usual, engine_named("zero3")).agrees is True


@pytest.mark.parametrize("rung", ["fsdp2", pytest.param("fsdp2+no-reshard", marks=pytest.mark.night)])
def test_weights_divided_within_each_node_train_as_those_divided_over_all_ranks(losses: Losses, rung: str) -> None:
    own = losses(f"{rung}+hybrid=2", **NODES)
    assert compare(own, losses("zero1", **NODES), engine_named(rung)).agrees is True
    assert own == pytest.approx(losses(rung, **NODES), rel=0.01)


@pytest.mark.timeout(900)
def test_an_optimizer_on_the_host_trains_alike_whether_gradients_cross_at_each_micro_step_or_at_the_boundary(
    losses: Losses, trial_environment: dict[str, str]
) -> None:
    assert build_operators(["cpu_adam"], trial_environment) == {"cpu_adam": None}  # two ranks at once might fail
    for rung in ("zero1+opt-cpu", "zero2+opt-cpu"):
        assert losses(rung) == pytest.approx(losses("zero1"), rel=0.002)
