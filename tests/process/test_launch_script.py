"""The emitted launch script, run by bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.answers import AWKWARD, answer

from ladder.emit import emit_all


def fake_accelerate(folder: Path) -> dict[str, str]:
    """An environment whose `accelerate` prints its arguments and its thread count, one a line."""
    folder.mkdir()
    program = folder / "accelerate"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(*sys.argv[1:], os.environ['OMP_NUM_THREADS'], sep='\\n')\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_the_launch_script_passes_the_user_s_words_on_unchanged(tmp_path: Path) -> None:
    launch = emit_all(answer(), tmp_path / AWKWARD / "best_config.json")[3]
    words = ["train.py", "--name", "a 'b' \"c\" $HOME *", ""]
    ran = subprocess.run(
        [str(launch), *words], env=fake_accelerate(tmp_path / "bin"), capture_output=True, text=True, check=True
    )
    yaml_path = str(tmp_path / AWKWARD / "best_config.accelerate.yaml")
    assert ran.stdout.split("\n") == ["launch", "--config_file", yaml_path, *words, "4", ""]


def test_the_launch_script_without_a_training_script_says_how_to_use_it(tmp_path: Path) -> None:
    launch = emit_all(answer(), tmp_path / "best_config.json")[3]
    ran = subprocess.run(["bash", str(launch)], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "train.py" in ran.stderr
