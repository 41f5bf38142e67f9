"""What `ladder tune` prints as a process: on a terminal, in a pipe, quietly, as JSON. Trials are simulated."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ladder.cli.main import main

LADDER = [sys.executable, "-m", "ladder.cli.main"]
TUNE = ["tune", "llama-2-7b", "--launcher", "simulated", "--machine", "a100-40", "--run-dir", "run"]
TUNE += ["--rung", "zero2", "--rung", "zero3"]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")


def on_a_terminal(*arguments: str, folder: Path, **environment: str) -> str:
    """Everything the command writes where stdout and stderr are one terminal of 100 columns."""
    controller, terminal = pty.openpty()
    pty_environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **environment}
    process = subprocess.Popen(
        [*LADDER, *arguments], cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal, env=pty_environment
    )
    os.close(terminal)
    written = b""
    try:
        while data := os.read(controller, 65536):
            written += data
    except OSError:  # the terminal's other end is closed
        pass
    os.close(controller)
    assert process.wait(timeout=60) == 0
    return written.decode()


def test_on_a_terminal_the_tune_is_live_and_ends_with_its_table(tmp_path: Path) -> None:
    written = on_a_terminal(*TUNE, folder=tmp_path)
    assert "\x1b[2K" in written  # lines are drawn over
    assert COLOUR.search(written)
    assert "simulated on" in written  # as its answer says, where a real one says that it is proven
    assert "\x1b[?25l" not in written.rpartition("\x1b[?25h")[2]  # the cursor is there at the end


def test_no_color_is_heeded(tmp_path: Path) -> None:
    written = on_a_terminal(*TUNE, folder=tmp_path, NO_COLOR="1")
    assert "\x1b[2K" in written
    assert not COLOUR.search(written)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Tunes in this process: the status, and what was printed."""
    monkeypatch.chdir(tmp_path)

    def tune(*arguments: str) -> tuple[int, str, str]:
        status = main([*TUNE, *arguments])
        return status, *capsys.readouterr()

    return tune


def test_json_is_one_document_on_stdout_and_says_what_the_files_say(tmp_path: Path, run: Run) -> None:
    _, output, errors = run("--format", "json")
    document: dict[str, Any] = json.loads(output)
    config = json.loads((tmp_path / "best_config.json").read_text())
    assert document["answer"] == config["ladder"]
    assert len(document["candidates"]) == len(pd.read_csv(tmp_path / "run" / "trials.csv"))
    assert "trial 0001" in errors


def test_quiet_leaves_only_the_answer(run: Run) -> None:
    _, output, errors = run("--quiet")
    assert errors == ""
    assert output.startswith("zero")
    assert "tokens/s" in output
    assert "Stopped" not in output


def test_on_forty_columns_every_rung_can_be_read(tmp_path: Path) -> None:
    written = on_a_terminal(*TUNE, "--rung", "zero3+param-cpu", folder=tmp_path, COLUMNS="40")
    table = written.rpartition("rung ")[2]
    assert "zero3" in table
    assert "+param-cpu" in table  # parted where its words are; no word is broken
    assert "…" not in table.partition("Stopped")[0]
