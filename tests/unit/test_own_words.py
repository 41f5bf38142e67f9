"""The answer in a script's own words: only where a second look sees what the answer says and the script's own steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.answers import answer as make_answer
from helpers.scripts import make_script, script_workload

from ladder.emit.answer import Answer, OwnWords
from ladder.emit.files import OutputPaths
from ladder.emit.launch import launch_script
from ladder.errors import UsageError
from ladder.tuning.own_words import in_own_words
from ladder.workload.script import OwnEngine, Script

OWN: dict[str, Any] = {
    "engine": OwnEngine(),
    "takes_options": True,
    "program": ("train.py",),
    "num_arguments": 2,
    "micro_batch": 4,
    "accumulation": 2,
    "planned_steps": 100,
}
COMMAND = ("torchrun", "--nproc_per_node", "4", "train.py", "--lr", "1e-5")


@pytest.fixture
def paths(tmp_path: Path) -> OutputPaths:
    return OutputPaths.beside(tmp_path / "best config.json")


def answer_with(**facts: Any) -> Answer:
    script = make_script(*COMMAND, **OWN | facts)
    found = make_answer()
    batch = found.candidate.sequences(found.world_size)
    return replace(found, workload=script_workload(script, global_batch_size=batch))


def words_of(answer: Answer, paths: OutputPaths, **facts: Any) -> tuple[OwnWords | None, list[str], list[Any]]:
    """The words, what was said, and the commands that were looked at: scripts that take all but `facts` as told."""
    said, looked = list[str](), list[Any]()
    candidate = answer.candidate
    told: dict[str, Any] = {
        "micro_batch": candidate.micro_batch,
        "accumulation": candidate.accumulation,
        "engine": OwnEngine(candidate.engine.rung.stage, checkpointing=candidate.gradient_checkpointing),
    }

    def look(command: Sequence[str]) -> Script:
        looked.append(command)
        assert answer.workload.script is not None
        return Script(command=tuple(command), facts=replace(answer.workload.script.facts, **told | facts))

    return in_own_words(answer, paths, look, said.append), said, looked


def test_a_script_that_takes_the_answer_is_started_by_torchrun_with_options_of_its_own(paths: OutputPaths) -> None:
    answer = answer_with()
    words, said, (looked,) = words_of(answer, paths)
    assert words is not None
    assert words.words[:3] == ("train.py", "--lr", "1e-5")
    assert said == []
    assert str(paths.config) in words.words
    assert str(paths.config) not in looked, "the file is not written yet"
    assert ("--per_device_train_batch_size", str(answer.candidate.micro_batch)) in itertools.pairwise(words.words)
    text = launch_script(replace(answer, own_words=words), paths)
    assert f"exec torchrun --standalone --nproc_per_node {answer.world_size} train.py --lr 1e-5 " in text
    assert "--deepspeed \"$here\"/'best config.json' " in text
    assert "exec ladder" not in text


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"micro_batch": 3}, "micro-batch"),
        ({"engine": OwnEngine()}, "engine"),
        ({"num_trainable": 7}, "trained parameters"),
        ({"dtype": "fp16"}, "precision"),
    ],
)
def test_a_script_that_sets_something_itself_is_started_by_ladder_which_says_what(
    paths: OutputPaths, facts: dict[str, Any], said: str
) -> None:
    words, (sentence,), _ = words_of(answer_with(), paths, **facts)
    assert words is None
    assert said in sentence


def test_another_number_of_steps_than_the_script_s_own_is_seen(paths: OutputPaths) -> None:
    answer = answer_with()
    script = make_script(*COMMAND, **OWN, global_batch=answer.workload.global_batch_size)
    answer = replace(answer, workload=replace(answer.workload, script=script))
    assert words_of(answer, paths)[0] is not None
    words, (sentence,), _ = words_of(answer, paths, planned_steps=25)
    assert words is None
    assert "steps" in sentence


@pytest.mark.parametrize(
    "facts",
    [
        {"program": ()},
        {"launcher": "other"},
    ],
)
def test_a_script_whose_launcher_says_what_no_other_can_is_not_looked_at_again(
    paths: OutputPaths, facts: dict[str, Any]
) -> None:
    assert words_of(answer_with(**facts), paths) == (None, [], [])


def test_a_script_that_refuses_the_options_is_started_by_ladder(paths: OutputPaths) -> None:
    said: list[str] = []

    def look(_: Sequence[str]) -> Script:
        raise UsageError("no")

    assert in_own_words(answer_with(), paths, look, said.append) is None
    assert "does not take the answer's options" in said[0]


def test_a_loop_with_accelerate_is_started_by_its_launcher_and_clips_by_itself(paths: OutputPaths) -> None:
    options = {"micro_batch": "--bs", "accumulation": "--acc"}
    answer = answer_with(kind="accelerate", takes_options=False, options=options, gradient_clipping=0.0)
    assert answer.workload.gradient_clipping == 1.0, "as its proof saw"
    own = OwnEngine(checkpointing=answer.candidate.gradient_checkpointing)
    words, said, (looked,) = words_of(answer, paths, engine=own)
    assert said == []
    assert looked[:5] == ["accelerate", "launch", "--mixed_precision", "bf16", "train.py"]
    assert words is not None
    assert words.words[-4:] == ("--bs", "4", "--acc", "2")
    text = launch_script(replace(answer, own_words=words), paths)
    assert 'exec accelerate launch --config_file "$here"/' in text
    assert "--deepspeed_config_file \"$here\"/'best config.json' train.py --lr 1e-5 " in text


def test_deepspeed_s_own_loop_is_not_told_to_offload_torch_s_optimizer(paths: OutputPaths) -> None:
    found = replace(answer_with(kind="deepspeed"), candidate=make_answer("zero2+opt-cpu").candidate)
    assert words_of(found, paths) == (None, [], [])
