"""README and docs: every command in them runs, every link leads somewhere.

A block of `bash` is run as it stands, in a folder where a tune has run; of `bash gpu`, and of what installs or trains,
the options of every ladder command are parsed. Blocks of `python` are run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from ladder.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.name}: {self.text.splitlines()[0]}"


def blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        for language, mark, text in BLOCK.findall(document.read_text()):
            yield Block(document, language, mark.strip(), text)


RUN = [block for block in blocks() if block.language in ("bash", "python") and not block.mark]
PARSED = [block for block in blocks() if block.language == "bash" and block.mark]


@pytest.fixture(scope="module")
def folder(small_tune: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a folder where a tune has run, so that the commands may write there."""
    copy = tmp_path_factory.mktemp("documents") / "tuned"
    shutil.copytree(small_tune, copy)
    return copy


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_every_command_runs(block: Block, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
    done = subprocess.run(
        [*shell, block.text],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("block", PARSED, ids=lambda block: block.name)
def test_the_options_of_what_cannot_run_here_exist(block: Block) -> None:
    assert block.mark in ("gpu", "install", "train")
    group = typer.main.get_command(app)
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words[:1] == ["ladder"]:
                command = group.commands[words[1]]  # type: ignore[attr-defined]
                command.make_context(words[1], words[2:])


def test_the_output_in_the_readme_is_what_its_command_prints(tmp_path: Path) -> None:
    command = "ladder tune llama-2-7b --launcher simulated --machine a100-40"
    (shown,) = [block for block in blocks() if block.language == "text" and block.document.name == "README.md"]
    assert [block for block in PARSED if command in block.text.splitlines()]
    program = str(Path(sys.executable).parent / "ladder")
    done = subprocess.run(
        [program, *command.split()[1:]], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    printed = {line.rstrip() for line in done.stdout.splitlines()}
    assert [line for line in shown.text.splitlines() if line not in printed] == []


def test_every_link_leads_to_a_file() -> None:
    broken = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in LINK.findall(document.read_text())
        if not (document.parent / target).exists()
    ]
    assert broken == []


def test_every_rung_and_every_outcome_is_explained() -> None:
    from typing import get_args

    from ladder.candidates import RUNGS
    from ladder.events.outcome import OutcomeKind

    rungs, outcomes = (ROOT / "docs" / "rungs.md").read_text(), (ROOT / "docs" / "outcomes.md").read_text()
    assert [rung.name for rung in RUNGS if f"| `{rung.name}` |" not in rungs] == []
    assert [kind for kind in get_args(OutcomeKind) if f"| `{kind}` |" not in outcomes] == []


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in typer.main.get_command(app).commands if f"ladder {name}" not in readme] == []  # type: ignore[attr-defined]
