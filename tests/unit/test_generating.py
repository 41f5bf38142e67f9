"""A script whose trainer writes what it trains on: its completions, its micro-batches, and what its trials are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import make_candidate
from helpers.answers import answer
from helpers.scripts import make_script, script_workload
from helpers.tunes import TWO_RANKS, ZERO1_AND_ZERO2

from ladder.backends.deepspeed.config import deepspeed_config
from ladder.emit import best_config
from ladder.emit.settings import settings_in
from ladder.emit.trainer import trainer_arguments
from ladder.errors import UsageError
from ladder.options.tune import TuneOptions
from ladder.tuning.own_script import script_spec, workload_of_script
from ladder.tuning.problem import make_space, micro_batches_of, problem_of
from ladder.tuning.trial_request import proof_steps
from ladder.workload.script import Generation, Script


def generation(**changes: Any) -> Generation:
    return Generation(**{"batch": None, "micro_steps": None, "per_prompt": 4, "longest": 256} | changes)


def grpo(**changes: Any) -> Script:
    """Of 4 sequences, accumulated twice."""
    return make_script(generation=generation(**changes))


@pytest.mark.parametrize(
    ("said", "completions"), [({}, 32), ({"micro_steps": 8}, 8 * 4 * 2), ({"batch": 128}, 128)], ids=str
)
def test_completions_are_those_of_a_step_unless_the_script_says_otherwise(
    said: dict[str, Any], completions: int
) -> None:
    assert script_workload(grpo(**said)).completions(2) == completions
    assert script_workload(make_script()).completions(2) is None
    assert proof_steps(script_workload(grpo()))["minimum"] < proof_steps(script_workload(make_script()))["minimum"]


@pytest.mark.parametrize(
    ("said", "possible"), [({}, (1, 2, 4, 8, 16)), ({"batch": 8}, (1, 2, 4)), ({"batch": 48}, (1, 2, 4, 8))], ids=str
)
def test_a_micro_batch_divides_what_a_rank_generates_and_what_it_trains_in_a_step(
    said: dict[str, Any], possible: tuple[int, ...]
) -> None:
    assert micro_batches_of(script_workload(grpo(**said)), 2, None) == possible


def test_a_generation_that_ranks_or_prompts_cannot_share_is_refused() -> None:
    for batch in (10, 9):
        with pytest.raises(UsageError, match=f"its {batch} completions at a time are no multiple of the 4 of a prompt"):
            workload_of_script(grpo(batch=batch), TuneOptions(script=("train.py",)), TWO_RANKS, print)


def test_trials_generate_as_much_at_any_micro_batch_and_evaluate_as_the_script_does(tmp_path: Path) -> None:
    workload, candidate = script_workload(grpo(micro_steps=8)), make_candidate(micro_batch=2, accumulation=8)
    config = deepspeed_config(workload, candidate.engine, micro_batch=2, accumulation=2, world_size=2, nvme_path=None)
    spec = script_spec(workload, candidate, TWO_RANKS, config, tmp_path)
    assert spec is not None
    assert (spec.arguments["generation_batch_size"], spec.arguments["steps_per_generation"]) == (64, None)
    assert spec.arguments["per_device_train_batch_size"] == 2
    assert "per_device_eval_batch_size" not in spec.arguments


def test_the_answer_keeps_what_its_script_generates_for_the_run() -> None:
    script = grpo(batch=64)
    stored = Script.from_dict(json.loads(json.dumps(script.as_dict())))
    assert stored.facts == replace(script.facts, model_config_json={})
    document = json.loads(json.dumps(best_config(answer("zero2", workload={"script": stored}))))
    assert document["ladder"]["script"]["generation_batch_size"] == 64
    arguments = trainer_arguments(settings_in(document), Path("deepspeed.json"))
    assert arguments["generation_batch_size"] == 64
    assert "per_device_eval_batch_size" not in arguments


def test_layers_are_checkpointed_all_or_none_because_the_trainer_switches_them_back_on_together() -> None:
    def space(script: Script) -> Any:
        problem = problem_of(script_workload(script), TWO_RANKS)
        return make_space(problem, ZERO1_AND_ZERO2, (1,), checkpointing=("1/2",))

    assert {each.checkpointing for each in space(grpo()).by_key.values()} == {"on", "off"}
    assert "1/2" in {each.checkpointing for each in space(make_script()).by_key.values()}
