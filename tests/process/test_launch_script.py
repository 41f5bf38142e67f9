"""The emitted launch script, run by bash."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from helpers.answers import AWKWARD, answer
from helpers.programs import program
from helpers.scripts import make_script

from ladder.emit import emit_all, trainer_command_line


def fake_accelerate(folder: Path, name: str = "accelerate") -> dict[str, str]:
    """An environment whose `accelerate` prints its arguments and its thread count, one a line."""
    folder.mkdir()
    fake = folder / name
    fake.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(*sys.argv[1:], os.environ.get('OMP_NUM_THREADS'), sep='\\n')\n"
    )
    fake.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_the_launch_script_passes_the_user_s_words_on_unchanged(tmp_path: Path) -> None:
    launch = emit_all(answer(), tmp_path / AWKWARD / "best_config.json")[3]
    words = ["train.py", "--name", "a 'b' \"c\" $HOME *", ""]
    ran = program(str(launch), *words, environment=fake_accelerate(tmp_path / "bin"))
    assert ran.stdout.split("\n") == [*launched(tmp_path / AWKWARD), *words, "4", ""]


def launched(folder: Path) -> list[str]:
    config = ["--deepspeed_config_file", str(folder / "best_config.json")]
    return ["launch", "--config_file", str(folder / "best_config.accelerate.yaml"), *config]


def test_the_trainer_s_arguments_are_those_of_its_file(tmp_path: Path) -> None:
    files = emit_all(answer(), tmp_path / "best_config.json")
    ran = program(str(files[3]), "--trainer", "train.py", environment=fake_accelerate(tmp_path / "bin"))
    added = ran.stdout.split("\n")[len(launched(tmp_path)) + 1 : -2]
    assert shlex.join(added) == trainer_command_line(json.loads(files[1].read_text()))


def test_the_launch_script_without_a_training_script_says_how_to_use_it(tmp_path: Path) -> None:
    launch = emit_all(answer(), tmp_path / "best_config.json")[3]
    assert "train.py" in program("bash", str(launch), "--trainer", status=2).stderr


def test_the_launch_script_of_a_script_starts_it_through_ladder_word_for_word(tmp_path: Path) -> None:
    words = ["train it.py", "--name", "a 'b' \"c\" $HOME *", "", "line\nbreak"]
    found = answer(workload={"script": make_script(*words)})
    launch = emit_all(found, tmp_path / AWKWARD / "best_config.json")[3]
    program("bash", "-n", str(launch))
    environment = fake_accelerate(tmp_path / "bin", "ladder")
    start = ["run", str(tmp_path / AWKWARD / "best_config.json"), "--"]
    assert program(str(launch), environment=environment).stdout == "\n".join([*start, *words, "None", ""])
    assert program(str(launch), "other.py", "a b", environment=environment).stdout == "\n".join(
        [*start, "other.py", "a b", "None", ""]
    )
