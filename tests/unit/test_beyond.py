"""What lies beyond the documented ladder: gradients offloaded at the boundary, half checkpointing, states in bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload, make_candidate, make_record, problem_for
from helpers.searches import BILLION, space_of
from helpers.values import PAPER

import ladder
from ladder.backends.deepspeed.config import default_knobs
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import HALF, Engine
from ladder.errors import UsageError
from ladder.machine.machine_speed import machine_speed
from ladder.options.technique_choices import TechniqueChoices, advice
from ladder.search.memory import predict_memory
from ladder.search.policy import documented_steps
from ladder.search.remedies import remedies
from ladder.search.space import ruled_out
from ladder.search.speed import predict_speed
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.adam_8bit import MOST_ELEMENTS as ELEMENTS_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.liger import LIGER
from ladder.techniques.unchecked_gradients import UNCHECKED_GRADIENTS
from ladder.tuning.problem import make_space
from ladder.units import GIB
from ladder.workload.lora import Lora

# Checkpointing of half of the layers


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


def test_the_documented_walk_knows_nothing_of_what_lies_beyond() -> None:
    steps = documented_steps(space_of())
    assert {step.engine.rung.name for step in steps} == {rung.name for rung in RUNGS if rung.documented}
    assert {step.checkpoint_every for step in steps} == {0, 1}
    everything = make_space(problem_for(BILLION), [RUNGS_BY_NAME["zero2"]], (1,), techniques=[LIGER, BF16_STATES])
    assert len(everything.engines) == 4
    assert {step.engine.key for step in documented_steps(everything)} == {"zero2"}


# Gradients that are not checked


def test_without_the_check_a_step_is_predicted_to_be_shorter_with_the_same_memory() -> None:
    usual = make_candidate("zero1", micro_batch=64, accumulation=1)
    unchecked = replace(usual, engine=usual.engine.having(UNCHECKED_GRADIENTS))
    h200 = machine_speed("NVIDIA H200", "cuda", 1, 16)
    before, after = (predict_speed(BILLION, each, world_size=1, machine=h200) for each in (usual, unchecked))
    saved = before.step_seconds(1) - after.step_seconds(1)
    assert 0.005 < saved < 0.05
    peaks = {predict_memory(BILLION, each, world_size=1, device="cuda").peak for each in (usual, unchecked)}
    assert len(peaks) == 1


def test_who_tunes_a_small_model_on_gpus_hears_of_unchecked_gradients_where_they_would_be_tried() -> None:
    small, rungs = problem_for(bundled_workload("opt-125m")), [RUNGS_BY_NAME["zero1"], RUNGS_BY_NAME["zero3"]]
    nothing_said = TechniqueChoices()
    assert "--allow unchecked-gradients" in "".join(advice(nothing_said, small, rungs))
    for choices, problem, names in (
        (TechniqueChoices(allow=["unchecked-gradients"]), small, rungs),
        (TechniqueChoices(documented=True), small, rungs),
        (nothing_said, small, rungs[1:]),
        (nothing_said, replace(small, device="cpu"), rungs),
        (nothing_said, problem_for(bundled_workload("opt-125m", dtype="fp16")), rungs),
        (nothing_said, problem_for(BILLION), rungs),
        (nothing_said, problem_for(replace(BILLION, lora=Lora(rank=16))), rungs),
    ):
        assert "unchecked" not in "".join(advice(choices, problem, names))


# What may be asked


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"allow": ["8-bit"]}, 'allow="8-bit" is unknown; choose from compile, compile-whole, bf16-states, adam-8bit'),
        (
            {"allow": ["bf16-states"], "dtype": "fp16"},
            'allow="bf16-states" needs dtype="bf16", but training is in fp16',
        ),
        ({"allow": ["bf16-states"], "rungs": ["zero2+opt-cpu"]}, "here: no rung that is tried keeps optimizer states"),
        (
            {"allow": ["bf16-states"], "strategy": "walk"},
            'follows the documented ladder, and allow="bf16-states" is not',
        ),
        ({"rungs": ["zero1+opt-cpu"], "strategy": "bisect"}, 'and rungs="zero1.opt-cpu" is not part of it'),
        (
            {"rungs": ["zero1+opt-cpu"], "documented": True},
            'leaves out what rungs="zero1.opt-cpu" asks',
        ),
        ({"liger": True, "documented": True}, "documented=True leaves out what liger=True asks for"),
        (
            {"allow": ["unchecked-gradients"], "rungs": ["zero3"]},
            "has no effect here: DeepSpeed can leave its check out only at stages 1 and 2",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        ladder.tune("llama-3.2-1b", run_dir=tmp_path, output=tmp_path / "best.json", **options, **PAPER)


# What `--allow adam-8bit` adds: Adam's moments in 8 bits, by bitsandbytes.


def test_a_share_that_is_too_long_for_their_kernels_is_updated_in_pieces_or_not_with_them() -> None:
    seven_billion = bundled_workload("llama-2-7b", seq_len=1024, global_batch_size=16)
    for world_size, able in ((2, {"zero3", "zero3+param-cpu"}), (4, {"zero1", "zero2", "zero3", "zero3+param-cpu"})):
        found = {rung.name for rung in RUNGS if ADAM_8BIT.suits(problem_for(seven_billion, world_size), rung)}
        assert found == able
    # Stage 3's pieces are never as long, whatever the knobs.
    for name in ("sub_group_size", "stage3_max_live_parameters"):
        assert default_knobs(seven_billion, RUNGS_BY_NAME["zero3"], 4)[name] < ELEMENTS_8BIT


def test_where_nothing_fits_they_are_among_what_would_but_not_for_an_optimizer_without_moments() -> None:
    on_gpu = [Engine(RUNGS_BY_NAME[name]) for name in ("zero1", "zero2")]
    assert "--allow adam-8bit" in remedies(space_of(*on_gpu, memory_limit=26 * GIB)).sentence()
    with_sgd = replace(BILLION, optimizer="sgd")
    assert "adam-8bit" not in remedies(space_of(*on_gpu, memory_limit=12 * GIB, workload=with_sgd)).sentence()
    assert "adam-8bit" not in remedies(space_of(*on_gpu, memory_limit=26 * GIB, device="cpu")).sentence()
