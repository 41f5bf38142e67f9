"""Gradients that are not checked: where DeepSpeed can leave the check out, and what that is predicted to save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload, make_candidate, problem_for
from helpers.searches import BILLION
from helpers.values import PAPER

import ladder
from ladder.backends.deepspeed.config import deepspeed_config
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate
from ladder.errors import UsageError
from ladder.machine.machine_speed import machine_speed
from ladder.search.memory import predict_memory
from ladder.search.speed import predict_speed
from ladder.simulation.paper_machine import read_machine
from ladder.simulation.physics import Physics
from ladder.techniques.keys import candidate_of
from ladder.techniques.unchecked_gradients import UNCHECKED_GRADIENTS
from ladder.tuning.technique_choices import TechniqueChoices, advice
from ladder.workload.lora import Lora

USUAL = make_candidate("zero1", micro_batch=64, accumulation=1)


def allowed(usual: Candidate) -> Candidate:
    return replace(usual, engine=usual.engine.having(UNCHECKED_GRADIENTS))


def test_they_are_for_stages_1_and_2_with_the_optimizer_on_the_gpu() -> None:
    problem = problem_for(BILLION)
    able = {name for name, rung in RUNGS_BY_NAME.items() if UNCHECKED_GRADIENTS.gets_into(rung, problem)}
    assert able == {"zero1", "zero2"}
    of_16_bits = problem_for(replace(BILLION, dtype="fp16"))
    assert not any(UNCHECKED_GRADIENTS.gets_into(rung, of_16_bits) for rung in RUNGS_BY_NAME.values())


def test_they_are_in_the_key_and_in_deepspeed_s_own_configuration() -> None:
    engine = candidate_of("zero2+liger+unchecked-gradients ckpt=on mb=2", 4).engine
    config = deepspeed_config(BILLION, engine, micro_batch=2, accumulation=2, world_size=1, nvme_path=None)
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False}
    usual = deepspeed_config(BILLION, USUAL.engine, micro_batch=2, accumulation=2, world_size=1, nvme_path=None)
    assert usual["bf16"] == {"enabled": True}


def test_a_step_is_predicted_and_simulated_to_be_shorter_by_work_of_the_host_with_the_same_memory() -> None:
    h200 = machine_speed("NVIDIA H200", "cuda", 1, 16)
    usual, own = (predict_speed(BILLION, each, world_size=1, machine=h200) for each in (USUAL, allowed(USUAL)))
    saved = usual.step_seconds(1) - own.step_seconds(1)
    machine = read_machine("h200").model_copy(update={"surprise": 0.0, "num_gpus": 1})
    physics = Physics(machine, BILLION, 1)
    simulated = physics.truth(USUAL).step_seconds(1) - physics.truth(allowed(USUAL)).step_seconds(1)
    assert 0.005 < saved < 0.05
    assert 0.2 < simulated / saved < 2  # the simulator's own constant is half as large
    peaks = {predict_memory(BILLION, each, world_size=1, device="cuda").peak for each in (USUAL, allowed(USUAL))}
    assert len(peaks) == 1


def test_who_tunes_a_small_model_on_gpus_hears_of_them_where_they_would_be_tried() -> None:
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "fp16"}, 'needs dtype="bf16", but training is in fp16'),
        ({"rungs": ["zero3"]}, "has no effect here: DeepSpeed can leave its check out only at stages 1 and 2"),
    ],
)
def test_where_they_can_be_nowhere_to_allow_them_is_refused(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        ladder.tune("opt-125m", allow=["unchecked-gradients"], run_dir=tmp_path / "run", **options, **PAPER)
