"""The emitted launch script, run by bash."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from helpers.answers import AWKWARD, answer
from helpers.scripts import make_script

from ladder.emit import emit_all, trainer_command_line


def fake_accelerate(folder: Path, name: str = "accelerate") -> dict[str, str]:
    """An environment whose `accelerate` prints its arguments and its thread count, one a line."""
    folder.mkdir()
    program = folder / name
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(*sys.argv[1:], os.environ.get('OMP_NUM_THREADS'), sep='\\n')\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_the_launch_script_passes_the_user_s_words_on_unchanged(tmp_path: Path) -> None:
    launch = emit_all(answer(), tmp_path / AWKWARD / "best_config.json")[3]
    words = ["train.py", "--name", "a 'b' \"c\" $HOME *", ""]
    ran = subprocess.run(
        [str(launch), *words], env=fake_accelerate(tmp_path / "bin"), capture_output=True, text=True, check=True
    )
    assert ran.stdout.split("\n") == [*launched(tmp_path / AWKWARD), *words, "4", ""]


def launched(folder: Path) -> list[str]:
    config = ["--deepspeed_config_file", str(folder / "best_config.json")]
    return ["launch", "--config_file", str(folder / "best_config.accelerate.yaml"), *config]


def test_files_that_are_moved_together_find_each_other(tmp_path: Path) -> None:
    emit_all(answer(), tmp_path / "before" / "best_config.json")
    moved = (tmp_path / "before").rename(tmp_path / AWKWARD)
    ran = subprocess.run(
        ["bash", "./best_config.launch.sh", "--trainer", "train.py", "--lr", "1"],
        cwd=moved,
        env=fake_accelerate(tmp_path / "bin"),
        capture_output=True,
        text=True,
        check=True,
    )
    words = ran.stdout.split("\n")
    assert words[:8] == [*launched(moved), "train.py", "--lr", "1"]
    assert words[8:10] == ["--deepspeed", str(moved / "best_config.json")]
    assert words[words.index("--per_device_train_batch_size") + 1] == "4"
    assert "before" not in ran.stdout


def test_the_trainer_s_arguments_are_those_of_its_file(tmp_path: Path) -> None:
    files = emit_all(answer(), tmp_path / "best_config.json")
    ran = subprocess.run(
        [str(files[3]), "--trainer", "train.py"],
        env=fake_accelerate(tmp_path / "bin"),
        capture_output=True,
        text=True,
        check=True,
    )
    added = ran.stdout.split("\n")[len(launched(tmp_path)) + 1 : -2]
    assert shlex.join(added) == trainer_command_line(json.loads(files[1].read_text()))


def test_the_launch_script_without_a_training_script_says_how_to_use_it(tmp_path: Path) -> None:
    launch = emit_all(answer(), tmp_path / "best_config.json")[3]
    ran = subprocess.run(["bash", str(launch), "--trainer"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "train.py" in ran.stderr


def test_the_launch_script_of_a_script_starts_it_through_ladder_word_for_word(tmp_path: Path) -> None:
    words = ["train it.py", "--name", "a 'b' \"c\" $HOME *", "", "line\nbreak"]
    found = answer(workload={"script": make_script(*words)})
    launch = emit_all(found, tmp_path / AWKWARD / "best_config.json")[3]
    subprocess.run(["bash", "-n", str(launch)], check=True)
    environment = fake_accelerate(tmp_path / "bin", "ladder")
    start = ["run", str(tmp_path / AWKWARD / "best_config.json"), "--"]
    ran = subprocess.run([str(launch)], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "\n".join([*start, *words, "None", ""])
    ran = subprocess.run([str(launch), "other.py", "a b"], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "\n".join([*start, "other.py", "a b", "None", ""])
