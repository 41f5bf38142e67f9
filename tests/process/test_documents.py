"""README and docs: every command in them runs, every link leads somewhere.

A block of `bash` or `python` without a mark is run as it stands, in a folder where a tune has run. The marks:

- `gpu`, `install`, `train` (bash): it needs what is not here; the options of its ladder commands are parsed.
- `script` (python): what users save as a training script; the tutorial's is run, the others are compiled.
- `shown`: output, written by scripts/reference.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
import yaml
from helpers.programs import BESIDE_PYTHON, program

from ladder.cli.main import _with_script, app

pytestmark = pytest.mark.timeout(900)  # the first test waits for the small tune, which a busy machine disturbs
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
OURS = re.compile(r"https://github\.com/oom-ladder/oom-ladder/(?:tree|blob)/main/(.*)")
SITE_PAGE = re.compile(r"https://oom-ladder\.github\.io/oom-ladder/([^#]*)")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


OFFLINE = {"PATH": BESIDE_PYTHON, "HF_HUB_OFFLINE": "1"}


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    language: str
    mark: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.stem}: {self.text.splitlines()[0]}"


def blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        for language, mark, text in BLOCK.findall(document.read_text()):
            yield Block(document, language, mark.strip(), text)


RUN = list({each.text: each for each in blocks() if each.language in ("bash", "python") and not each.mark}.values())
PARSED = [block for block in blocks() if block.language == "bash" and block.mark not in ("", "shown")]
SCRIPTS = [block for block in blocks() if block.language == "python" and block.mark]


@pytest.fixture(scope="module")
def folder(small_tune: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a folder where a tune has run, so that the commands may write there."""
    copy = tmp_path_factory.mktemp("documents") / "tuned"
    shutil.copytree(small_tune, copy)
    return copy


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_every_command_runs(block: Block, folder: Path) -> None:
    shell = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
    assert "Traceback" not in program(*shell, block.text, folder=folder, environment=OFFLINE).stderr


@pytest.mark.parametrize("block", PARSED, ids=lambda block: block.name)
def test_the_options_of_what_cannot_run_here_exist(block: Block) -> None:
    assert block.mark in ("gpu", "install", "train")
    for arguments in map(_with_script, ladder_commands(block.text)):
        command = COMMANDS[arguments[0]]
        command.make_context(arguments[0], arguments[1:])


def ladder_commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `ladder` in some lines of shell, also of one that another program starts."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        for at, word in enumerate(words):
            if word == "ladder" and at + 1 < len(words) and words[at + 1] in COMMANDS:
                rest = words[at + 1 :]
                ends = [index for index, each in enumerate(rest) if set(each) <= set("&|;()<>")]
                yield rest[: min(ends, default=len(rest))]


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.name)
def test_every_script_compiles(block: Block) -> None:
    assert block.mark == "script"
    compile(block.text, block.name, "exec")


def test_the_tutorial_s_script_trains_with_the_answer(folder: Path) -> None:
    (block,) = (block for block in SCRIPTS if block.document == DOCS / "tutorial.md")
    (folder / "train.py").write_text(block.text)
    done = program("bash", "best_config.launch.sh", "train.py", folder=folder, environment=OFFLINE, status=None)
    # Not the status: in the interpreter's own end one of torch's threads now and then aborts the process.
    assert "'train_loss'" in done.stdout, done.stdout + done.stderr


def test_the_page_on_generating_goes_from_the_tune_to_text(folder: Path) -> None:
    page = DOCS / "generate.md"
    (script,) = (block for block in SCRIPTS if block.document == page)
    (folder / "train_and_save.py").write_text(script.text)
    _, train, tune, generate = (each.text for each in blocks() if each.document == page and each.mark == "train")
    assert "'eval_loss'" in program("bash", "-c", train, folder=folder, environment=OFFLINE, status=None).stdout
    program("bash", "-c", tune, folder=folder, environment=OFFLINE)
    written = program("bash", "-c", generate, folder=folder, environment=OFFLINE).stdout.splitlines()
    # At most: the model may choose the token that ends a text.
    three, two = sorted(written, key=lambda line: line.startswith("w11"))
    for text, prompt in ((three, "w3 w5 w7"), (two, "w11 w13")):
        assert text.startswith(prompt), written
        assert len(text.split()) <= len(prompt.split()) + 8, written
    assert three != "w3 w5 w7" or two != "w11 w13"


def test_the_output_in_the_readme_is_what_its_command_prints(tmp_path: Path) -> None:
    command = "ladder tune llama-2-7b --launcher simulated --machine a100-40 --output simulated.json"
    (shown,) = [block for block in blocks() if block.language == "text" and block.document.name == "README.md"]
    assert [block for block in PARSED if command in block.text.splitlines()]
    done = program("bash", "-c", command, folder=tmp_path, environment=OFFLINE)
    printed = {line.rstrip() for line in done.stdout.splitlines()}
    assert [line for line in shown.text.splitlines() if line not in printed] == []


def test_every_link_leads_to_a_file() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in LINK.findall(document.read_text())
        if not leads_somewhere(document, target)
    ]
    assert broken == []


def leads_somewhere(document: Path, target: str) -> bool:
    if match := OURS.fullmatch(target):
        return (ROOT / match[1]).exists()
    if match := SITE_PAGE.fullmatch(target):
        page = match[1].rstrip("/") or "index"
        return (DOCS / f"{page}.md").exists()
    return target.startswith(("http://", "https://")) or (document.parent / target).exists()


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = set(re.findall(r"[\w/-]+\.md", json.dumps(navigation)))
    assert pages == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"ladder {name}" not in readme] == []
