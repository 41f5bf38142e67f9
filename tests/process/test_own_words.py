"""The answer in the words of scripts of many kinds, each looked at as it would be started without ladder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.answers import answer as make_answer
from helpers.rehearsals import Rehearsals, rehearsals_of_held

from ladder.emit import emit_all
from ladder.emit.answer import Answer
from ladder.emit.files import OutputPaths
from ladder.techniques.keys import candidate_of
from ladder.tuning.own_words import in_own_words
from ladder.workload.script import OwnEngine

FILES = {
    "trainer.yaml": "bf16: true\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n",
    "fsdp2.yaml": "bf16: true\nper_device_train_batch_size: 4\nfsdp: true\nfsdp_config: {reshard_after_forward: no}\n",
    "fsdp1.yaml": "bf16: true\nper_device_train_batch_size: 4\nfsdp: true\nfsdp_config: {version: 1}\n",
    "own.yaml": "data:\n  size: 4  # only looks like it\ntrain:\n  size: 4\n  every: 2\n",
    "two.yaml": "size: 2\n",
    "ds.json": json.dumps(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
        }
    ),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str]) -> Iterator[Rehearsals]:
    with rehearsals_of_held(tmp_path_factory.mktemp("told"), trial_environment) as held:
        for name, text in FILES.items():
            (held.home / name).write_text(text)
        yield held


def said_of(home: Rehearsals, key: str, *command: str) -> tuple[Answer, OutputPaths, list[str]]:
    """The answer `key` of a script on two CPU ranks, in its own words if there are any, and what was said."""
    workload = home.workload(home.look("told_otherwise.py", *command))
    candidate = candidate_of(key, workload.global_batch_size, 2)
    answer = replace(
        make_answer(), workload=workload, candidate=candidate, world_size=2, device="cpu", gpu_name=None, allocator={}
    )
    paths, said = OutputPaths.beside(home.home / "best_plain.json"), list[str]()
    words = in_own_words(answer, paths, lambda told: home.look(*told), said.append)
    return replace(answer, own_words=words), paths, said


def test_keys_of_the_trainer_are_changed_in_a_copy_of_the_file_and_torchrun_trains_all_steps(home: Rehearsals) -> None:
    answer, paths, said = said_of(home, "ddp ckpt=off mb=8", "names_of_the_trainer", "trainer.yaml")
    assert (said, answer.own_words and answer.own_words.by) == ([], "torchrun")
    emit_all(answer, home.home / "best_config.json")
    assert (home.home / "trainer.yaml").read_text() == FILES["trainer.yaml"], "the user's own stays as it is"
    told = yaml.safe_load((home.home / "best_plain.trainer.yaml").read_text())
    assert (told["per_device_train_batch_size"], told["gradient_accumulation_steps"]) == (8, 1)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": ""}
    done = subprocess.run(
        ["bash", str(paths.launch)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    # Not the status: in the interpreter's own end one of torch's threads now and then aborts the process.
    assert "'train_samples_per_second'" in done.stdout, done.stdout + done.stderr
    assert "12/12" in done.stderr


def test_fsdp2_is_what_a_script_does_by_itself_and_fsdp1_is_like_no_rung(home: Rehearsals) -> None:
    command = ("told_otherwise.py", "names_of_the_trainer")
    assert home.look(*command, "fsdp2.yaml").facts.engine == OwnEngine(2, fsdp2=True)
    assert home.look(*command, "fsdp1.yaml").facts.engine is None


def test_keys_of_its_own_are_found_by_what_a_look_sees_change(home: Rehearsals) -> None:
    answer, _, said = said_of(home, "ddp ckpt=off mb=8", "names_of_its_own", "own.yaml")
    assert answer.own_words is not None, said
    (text,) = answer.own_words.files.values()
    assert yaml.safe_load(text) == {"data": {"size": 4}, "train": {"size": 8, "every": 1}}


def test_a_key_that_changes_two_things_at_once_sets_neither(home: Rehearsals) -> None:
    answer, _, said = said_of(home, "ddp ckpt=off mb=4", "one_name_for_two", "two.yaml")
    assert answer.own_words is None
    assert "`ladder run` starts it" in said[0]


def test_options_that_were_not_typed_are_found_and_accelerate_starts_their_loop(home: Rehearsals) -> None:
    answer, _, said = said_of(home, "ddp ckpt=off mb=8", "loop")
    assert answer.own_words is not None, said
    assert (answer.own_words.by, answer.own_words.words[-4:]) == ("accelerate", ("--bs", "8", "--acc", "1"))


def test_a_file_of_deepspeed_gives_way_to_the_answer(home: Rehearsals) -> None:
    command = ("file_of_deepspeed", "--deepspeed", "--deepspeed_config", "ds.json")
    answer, paths, said = said_of(home, "zero1 ckpt=off mb=8", *command)
    assert answer.own_words is not None, said
    assert answer.own_words.words[-1] == str(paths.config)
