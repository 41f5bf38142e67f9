"""FP8 as a technique: where it is tried, what training is told, and what it is predicted to hold and to take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import bundled_workload, machine_with, space_on
from helpers.answers import answer

from ladder.backends.activations import terms_of
from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import Candidate
from ladder.emit.accelerate import accelerate_config
from ladder.emit.config import launch_environment
from ladder.emit.trainer import trainer_arguments
from ladder.errors import UsageError
from ladder.machine.described import Gpu, Machine
from ladder.techniques.compiled import COMPILE
from ladder.techniques.fp8 import FP8
from ladder.techniques.keys import engine_named
from ladder.tuning.problem import problem_of
from ladder.tuning.technique_choices import require_effective_techniques
from ladder.units import GIB
from ladder.workload.lora import Lora

LLAMA = bundled_workload("llama-2-7b")
TWO = machine_with(2)


def machine_of(name: str) -> Machine:
    return replace(TWO, gpus=tuple(Gpu(f"GPU-{rank}", name, 80 * GIB) for rank in range(2)))


def test_it_is_tried_on_rungs_without_deepspeed_that_offload_nothing_also_compiled() -> None:
    space, _ = space_on(LLAMA, TWO, tuple(RUNGS_BY_NAME.values()), (1,), techniques=[COMPILE, FP8])
    found = {engine.name for engine in space.engines if FP8 in engine.techniques}
    rungs = ("ddp", "fsdp2", "fsdp2+no-reshard")
    assert found == {f"{rung}{also}+fp8" for rung in rungs for also in ("", "+compile")}


@pytest.mark.parametrize(
    ("gpu", "has_it"),
    [
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA A10G", False),
        ("NVIDIA GeForce RTX 3090", False),
        ("NVIDIA RTX A6000", False),
        ("Tesla V100-SXM2-32GB", False),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA L40S", True),
        ("NVIDIA RTX 6000 Ada Generation", True),
        ("NVIDIA GeForce RTX 4090", True),
        ("NVIDIA B200", True),
    ],
)
def test_gpus_older_than_ada_are_refused_in_one_sentence(gpu: str, has_it: bool) -> None:
    ddp, problem = engine_named("ddp").rung, problem_of(LLAMA, machine_of(gpu))
    if has_it:
        require_effective_techniques([FP8], problem, [ddp])
    else:
        with pytest.raises(
            UsageError, match=r"--allow fp8 has no effect here: FP8 needs GPUs .* 8\.9 .*; leave it out"
        ):
            require_effective_techniques([FP8], problem, [ddp])


def test_cpu_ranks_and_frozen_weights_are_refused_in_one_sentence() -> None:
    assert FP8.refusal(LLAMA, "cuda") == ""
    assert "needs a GPU" in FP8.refusal(LLAMA, "cpu")
    assert "not beside frozen ones" in FP8.refusal(replace(LLAMA, lora=Lora(rank=8)), "cuda")


@pytest.mark.parametrize("name", ["ddp+fp8", "fsdp2+fp8"])
def test_accelerate_and_the_trainer_are_told_of_it_and_weights_are_loaded_on_all_ranks(name: str) -> None:
    engine, usual = engine_named(name), answer("zero1")
    found = replace(usual, candidate=replace(usual.candidate, engine=engine))
    said = accelerate_config(found, found.run_dir)
    assert said["mixed_precision"] == "fp8"
    assert said["fp8_config"]["backend"] == "AO"
    told = trainer_arguments(found, found.run_dir)
    assert told["bf16"] is False
    environment = launch_environment(found)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "fp8"
    assert environment["ACCELERATE_FP8_BACKEND"] == "AO"
    assert environment["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"] == "false", (
        "safetensors cannot save such weights"
    )
    if engine.rung.stage:  # accelerate refuses both together
        assert said["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
        assert told["fsdp_config"]["cpu_ram_efficient_loading"] is False
        config = backend_of(engine.rung).configuration(
            LLAMA, engine, micro_batch=1, accumulation=1, world_size=2, nvme_path=None
        )
        assert config["fsdp"]["cpu_ram_efficient_loading"] is False


def test_no_copy_of_a_weight_is_saved_for_the_backward_pass() -> None:
    def live(name: str) -> float:
        candidate = Candidate(engine_named(name), 0, 1, 1)
        backend = backend_of(candidate.engine.rung)
        return max(each.live for each in backend.moments(LLAMA, candidate, 2, "cuda"))

    copies = 2 * LLAMA.model.num_layers * LLAMA.model.num_block_parameters
    assert live("ddp") - live("ddp+fp8") == pytest.approx(copies)


def test_it_is_predicted_to_be_faster_only_where_it_is_compiled() -> None:
    def compute(name: str) -> float:
        return terms_of(LLAMA, Candidate(engine_named(name), 0, 8, 1), 2).compute

    assert compute("ddp+compile+fp8") < compute("ddp") < compute("ddp+fp8")
