"""What `--allow adam-8bit` adds: Adam's moments in 8 bits, by bitsandbytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import bundled_workload, make_candidate, problem_for
from helpers.answers import answer
from helpers.searches import BILLION, space_of
from helpers.values import PAPER

import ladder
from ladder.backends.deepspeed.config import deepspeed_config, default_knobs
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.emit import best_config
from ladder.emit.exporters.registry import exported
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.emit.settings import settings_in
from ladder.emit.trainer import trainer_arguments
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.search.memory import predict_memory
from ladder.search.remedies import remedies
from ladder.techniques.adam_8bit import ADAM_8BIT
from ladder.techniques.adam_8bit import MOST_ELEMENTS as ELEMENTS_8BIT
from ladder.techniques.bf16_states import BF16_STATES
from ladder.techniques.keys import candidate_of
from ladder.techniques.liger import LIGER
from ladder.tuning.problem import make_space
from ladder.tuning.technique_choices import require_effective_techniques, require_usable
from ladder.units import GIB
from ladder.workload.source import resolve_model
from ladder.workload.workload import OptimizerName, Workload

LARGE_VOCABULARY = Path(__file__).parents[2] / "benchmarks" / "models" / "large-vocabulary-1.5b.json"


def in_8_bits(rung: str, **candidate: Any) -> Candidate:
    usual = make_candidate(rung, **candidate)
    return replace(usual, engine=usual.engine.having(ADAM_8BIT))


def test_they_take_a_quarter_of_their_memory_and_leave_master_weights_as_they_are() -> None:
    candidates = [make_candidate("zero2", micro_batch=1), in_8_bits("zero2", micro_batch=1)]
    usual, allowed = (predict_memory(BILLION, each, world_size=1, device="cuda").moments for each in candidates)
    saved = (6 - 2 * 4 / 256) * BILLION.model.num_parameters  # there is a scale in fp32 for each 256 elements
    assert usual["initialisation"] - allowed["initialisation"] == pytest.approx(saved, rel=1e-6)
    assert usual["step"] - allowed["step"] == pytest.approx(saved, rel=1e-6)  # gradients in fp32


def test_what_an_h200_allocated_for_them_is_predicted() -> None:
    # benchmarks/results/1xh200-more-rungs: adam-8bit.json
    workload = Workload(
        model=resolve_model(str(LARGE_VOCABULARY)), task="causal-lm", seq_len=1024, global_batch_size=32
    )
    fitted = candidate_of("zero3+liger+adam-8bit ckpt=on mb=16", 32)
    moments = predict_memory(workload, fitted, world_size=1, device="cuda").moments
    assert max(moments.values()) == pytest.approx(20.874 * GIB, rel=0.005)
    ran_out = candidate_of("zero1+liger+adam-8bit ckpt=on mb=16", 32)
    moments = predict_memory(workload, ran_out, world_size=1, device="cuda").moments
    assert max(moments, key=lambda name: moments[name]) == "step"
    assert moments["step"] > 24 * GIB


def test_they_are_in_the_key_and_deepspeed_is_told_that_it_did_not_try_this_optimizer() -> None:
    named = candidate_of("zero3+liger+adam-8bit ckpt=on mb=2", 4).engine
    assert named == Engine(RUNGS_BY_NAME["zero3"], techniques=(LIGER, ADAM_8BIT))
    assert named.name == "zero3+liger+adam-8bit"
    config = deepspeed_config(BILLION, named, micro_batch=1, accumulation=1, world_size=1, nvme_path=None)
    assert config["zero_allow_untested_optimizer"] is True
    assert "zero_force_ds_cpu_optimizer" not in config
    assert config["bf16"] == {"enabled": True}


def test_all_that_is_allowed_is_tried_each_by_itself() -> None:
    problem, techniques = problem_for(BILLION), [BF16_STATES, ADAM_8BIT]
    space = make_space(problem, [RUNGS_BY_NAME["zero2"]], (1,), techniques=techniques)
    assert [engine.name for engine in space.engines] == ["zero2", "zero2+bf16-states", "zero2+adam-8bit"]


def test_a_share_that_is_too_long_for_their_kernels_is_updated_in_pieces_or_not_with_them() -> None:
    seven_billion = bundled_workload("llama-2-7b", seq_len=1024, global_batch_size=16)
    for world_size, able in ((2, {"zero3", "zero3+param-cpu"}), (4, {"zero1", "zero2", "zero3", "zero3+param-cpu"})):
        found = {rung.name for rung in RUNGS if ADAM_8BIT.suits(problem_for(seven_billion, world_size), rung)}
        assert found == able
    # Stage 3's pieces are never as long, whatever the knobs.
    for name in ("sub_group_size", "stage3_max_live_parameters"):
        assert default_knobs(seven_billion, RUNGS_BY_NAME["zero3"], 4)[name] < ELEMENTS_8BIT


def test_where_they_can_be_nowhere_to_allow_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"has no effect here: .* less than 2\.1 billion parameters a GPU; leave it out"
    ):
        ladder.tune("llama-2-7b", rungs=["zero1", "zero2"], output=tmp_path / "best.json", allow=["adam-8bit"], **PAPER)
    with pytest.raises(UsageError, match="--allow adam-8bit has no effect here: moments in 8 bits are for GPUs"):
        require_effective_techniques([BF16_STATES, ADAM_8BIT], problem_for(BILLION, 2, "cpu"), RUNGS)


@pytest.mark.parametrize(("optimizer", "own"), [("adamw", {}), ("adam", {"weight_decay": 0.0})])
def test_every_kind_of_script_is_told_of_them(optimizer: OptimizerName, own: dict[str, Any], tmp_path: Path) -> None:
    given = answer(workload={"optimizer": optimizer}, candidate=in_8_bits("zero3", micro_batch=4, accumulation=2))
    arguments = trainer_arguments(given, tmp_path / "best_config.json")
    assert arguments["optim"] == "adamw_bnb_8bit"
    assert {name: arguments[name] for name in own} == own
    script = launch_script(given, OutputPaths.beside(tmp_path / "best_config.json"))
    assert script.count(f"bitsandbytes.optim.{'AdamW8bit' if optimizer == 'adamw' else 'Adam8bit'}(…)") == 2
    assert "torch.optim" not in script
    document = best_config(given)
    assert document["ladder"]["adam_8bit"] is True
    assert ADAM_8BIT in settings_in(document).techniques
    for target in ("axolotl", "llama-factory", "trl"):
        fragment = yaml.safe_load(exported(document, tmp_path / "best_config.json", target))
        assert fragment["optimizer" if target == "axolotl" else "optim"] == "adamw_bnb_8bit"


def test_without_bitsandbytes_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFaultError, match="`pip install bitsandbytes`"):
        require_usable(ADAM_8BIT, BILLION, "cuda")


def test_where_nothing_fits_they_are_among_what_would_but_not_for_an_optimizer_without_moments() -> None:
    on_gpu = [Engine(RUNGS_BY_NAME[name]) for name in ("zero1", "zero2")]
    assert "--allow adam-8bit" in remedies(space_of(*on_gpu, memory_limit=26 * GIB)).sentence()
    with_sgd = replace(BILLION, optimizer="sgd")
    assert "adam-8bit" not in remedies(space_of(*on_gpu, memory_limit=12 * GIB, workload=with_sgd)).sentence()
    assert "adam-8bit" not in remedies(space_of(*on_gpu, memory_limit=26 * GIB, device="cpu")).sentence()
