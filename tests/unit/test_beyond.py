"""What lies beyond the documented ladder: gradients offloaded at the boundary, half checkpointing, states in bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import make_candidate, make_record, problem_for
from helpers.answers import answer
from helpers.searches import BILLION, space_of
from helpers.values import PAPER

import ladder
from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import HALF, Candidate, Engine, candidates_of
from ladder.emit import best_config
from ladder.emit.exporters.registry import exported
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.emit.settings import settings_in
from ladder.emit.trainer import trainer_arguments
from ladder.errors import UsageError
from ladder.machine.machine_speed import machine_speed
from ladder.search.memory import predict_memory
from ladder.search.policy import documented_steps
from ladder.search.remedies import remedies
from ladder.search.space import ruled_out
from ladder.search.speed import predict_speed
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.keys import candidate_of
from ladder.techniques.liger import LIGER
from ladder.tuning.parity import as_reference
from ladder.tuning.problem import make_space
from ladder.tuning.technique_choices import ways_of_checkpointing
from ladder.units import GIB


def peak(candidate: Candidate) -> int:
    return predict_memory(BILLION, candidate, world_size=1, device="cuda").peak


def tokens_per_second(candidate: Candidate) -> float:
    machine = machine_speed("NVIDIA H200", "cuda", 1, 16)
    return predict_speed(BILLION, candidate, world_size=1, machine=machine).tokens_per_second


def checkpointed(every: int, rung: str = "zero2") -> Candidate:
    return replace(make_candidate(rung, micro_batch=4, accumulation=16), checkpoint_every=every)


def every_engine(rung: str) -> tuple[Engine, ...]:
    techniques = [LIGER, BF16_STATES]
    return make_space(problem_for(BILLION), [RUNGS_BY_NAME[rung]], (1,), techniques=techniques).engines


# Checkpointing of half of the layers


def test_half_checkpointing_lies_between_all_and_none_in_memory_and_in_speed() -> None:
    every, half, none = (checkpointed(each) for each in (1, HALF, 0))
    assert peak(every) < peak(half) < peak(none)
    assert tokens_per_second(every) < tokens_per_second(half) < tokens_per_second(none)


def test_it_is_a_candidate_with_a_key_of_its_own_where_it_is_asked_for() -> None:
    engine = Engine(RUNGS_BY_NAME["zero3"])
    space = replace(space_of(engine), micro_batches=(2, 4))
    found = [each for each in space.candidates if each.checkpoint_every == HALF]
    assert {each.variant for each in found} == {"ckpt=1/2 mb=2", "ckpt=1/2 mb=4"}
    assert all(space.named(each.key) == each for each in found)
    assert not any(each.checkpoint_every == HALF for each in candidates_of(engine, 8, [2, 4]))


def test_what_ran_out_with_all_layers_checkpointed_does_so_with_half_of_them_but_not_the_other_way_round() -> None:
    engine = Engine(RUNGS_BY_NAME["zero2"])
    space = space_of(engine)
    every, half, none = (
        next(each for each in space.candidates if (each.checkpoint_every, each.micro_batch) == (of, 2))
        for of in (1, HALF, 0)
    )
    assert ruled_out(half, space, [make_record(every, kind="gpu_oom")])
    out_at_half = [make_record(half, kind="gpu_oom")]
    assert ruled_out(none, space, out_at_half)
    assert not ruled_out(every, space, out_at_half)


@pytest.mark.parametrize(
    ("version", "expected"), [("5.17.0", False), ("5.18.0", True), ("6.0.0.dev0", True), ("not installed", False)]
)
def test_it_needs_a_transformers_whose_trainer_can_do_it(version: str, expected: bool) -> None:
    assert ("1/2" in ways_of_checkpointing(version)) is expected


def test_the_emitted_files_switch_it_on_and_are_read_back(tmp_path: Path) -> None:
    found = answer(candidate=replace(answer().candidate, checkpoint_every=HALF))
    config = tmp_path / "best_config.json"
    arguments, document = trainer_arguments(found, config), best_config(found)
    assert arguments["gradient_checkpointing"] is True
    assert arguments["gradient_checkpointing_kwargs"] == {"use_reentrant": False, "every_n_layers": 2}
    assert "every 2 layers (every_n_layers" in launch_script(found, OutputPaths.beside(config))
    assert settings_in(document).checkpoint_every == HALF
    assert yaml.safe_load(exported(document, config, "axolotl"))["gradient_checkpointing_kwargs"]["every_n_layers"] == 2
    factory = exported(document, config, "llama-factory")
    assert yaml.safe_load(factory)["disable_gradient_checkpointing"] is False
    assert "checkpoints all layers or none" in factory


# The optimizer on the host at stage 1


def test_with_many_accumulation_steps_gradients_that_cross_the_bus_once_are_faster_and_need_more_memory() -> None:
    at_boundary, each_time = (
        make_candidate("zero1+opt-cpu", micro_batch=4, accumulation=16),
        checkpointed(1, "zero2+opt-cpu"),
    )
    assert tokens_per_second(at_boundary) > tokens_per_second(each_time)
    assert peak(at_boundary) - peak(each_time) > 1.5 * BILLION.model.num_parameters


def test_the_documented_walk_knows_nothing_of_what_lies_beyond() -> None:
    steps = documented_steps(space_of())
    assert {step.engine.rung.name for step in steps} == {rung.name for rung in RUNGS if rung.documented}
    assert {step.checkpoint_every for step in steps} == {0, 1}


def test_the_documented_walk_knows_neither_liger_s_kernels_nor_states_in_bf16() -> None:
    everything = every_engine("zero2")
    assert len(everything) == 4
    assert {step.engine.key for step in documented_steps(space_of(*everything))} == {"zero2"}


# States in bf16


def test_states_in_bf16_take_half_the_memory_and_half_the_optimizer_s_time() -> None:
    usual = make_candidate("zero2", micro_batch=1, accumulation=64)
    allowed = replace(usual, engine=usual.engine.having(BF16_STATES))
    moments = [predict_memory(BILLION, each, world_size=1, device="cuda").moments for each in (usual, allowed)]
    saved = moments[0]["initialisation"] - moments[1]["initialisation"]
    assert saved == pytest.approx(6 * BILLION.model.num_parameters, rel=1e-6)
    assert tokens_per_second(allowed) > tokens_per_second(usual)


def test_they_are_in_the_key_and_in_deepspeed_s_own_configuration() -> None:
    (engine,) = (each for each in every_engine("zero3") if len(each.techniques) == 2)
    assert engine.name == "zero3+liger+bf16-states"
    assert candidate_of("zero3+liger+bf16-states ckpt=1/2 mb=2", 4) == Candidate(engine, HALF, 2, 2)
    config = deepspeed_config(BILLION, engine, micro_batch=1, accumulation=1, world_size=1, nvme_path=None)
    assert config["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert "states" not in str(
        deepspeed_config(BILLION, Engine(engine.rung), micro_batch=1, accumulation=1, world_size=1, nvme_path=None)
    )


def test_deepspeed_can_have_them_from_stage_1_on_and_on_the_gpu_only() -> None:
    able = {rung.name for rung in RUNGS if BF16_STATES.suits(problem_for(BILLION), rung)}
    assert able == {"zero1", "zero2", "zero3", "zero3+param-cpu"}


def test_their_losses_are_held_against_the_plain_rung_s_with_the_same_states() -> None:
    usual = make_candidate("zero3")
    allowed = replace(usual, engine=usual.engine.having(BF16_STATES))
    assert as_reference(allowed).engine.name == "zero1+bf16-states"
    assert as_reference(usual).engine.name == "zero1"


def test_where_nothing_fits_they_are_among_what_would() -> None:
    on_gpu = [Engine(RUNGS_BY_NAME[name]) for name in ("zero1", "zero2")]
    assert "--allow bf16-states" in remedies(space_of(*on_gpu, memory_limit=20 * GIB)).sentence()
    assert (
        "bf16-states"
        not in remedies(space_of(*on_gpu, memory_limit=20 * GIB, workload=replace(BILLION, dtype="fp16"))).sentence()
    )


# What may be asked


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"allow": ["8-bit"]}, 'allow="8-bit" is unknown; choose from compile, compile-whole, bf16-states, adam-8bit'),
        (
            {"allow": ["bf16-states"], "dtype": "fp16"},
            'allow="bf16-states" needs dtype="bf16", but training is in fp16',
        ),
        ({"allow": ["adam-8bit"], "optimizer": "sgd"}, 'allow="adam-8bit" has no effect with optimizer="sgd"'),
        ({"allow": ["adam-8bit"], "rungs": ["zero0"]}, 'allow="adam-8bit" has no effect here: moments in 8 bits'),
        ({"allow": ["bf16-states"], "rungs": ["zero2+opt-cpu"]}, "here: no rung that is tried keeps optimizer states"),
        (
            {"allow": ["bf16-states"], "strategy": "walk"},
            'follows the documented ladder, and allow="bf16-states" is not',
        ),
        ({"rungs": ["zero1+opt-cpu"], "strategy": "bisect"}, 'and rungs="zero1.opt-cpu" is not part of it'),
        (
            {"allow": ["bf16-states"], "documented": True},
            'leaves out what allow="bf16-states" asks for',
        ),
        (
            {"rungs": ["zero1+opt-cpu"], "documented": True},
            'leaves out what rungs="zero1.opt-cpu" asks',
        ),
        ({"liger": True, "documented": True}, "documented=True leaves out what liger=True asks for"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        ladder.tune("llama-3.2-1b", run_dir=tmp_path, output=tmp_path / "best.json", **options, **PAPER)
