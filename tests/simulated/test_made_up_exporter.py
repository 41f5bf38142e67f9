"""An exporter is its own file and one line: a made-up one writes an answer, and what it cannot write is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers.answers import answer
from helpers.made_up import MadeUp, including

from ladder.cli.export import Exported
from ladder.emit import Answer, emit_all, load_best_config
from ladder.emit.exporters.base import Exporter, opening_comment
from ladder.emit.exporters.registry import EXPORTERS, exported
from ladder.emit.settings import Settings
from ladder.errors import UsageError
from ladder.options.declaring import declared
from ladder.techniques.keys import engine_named
from ladder.techniques.registry import TECHNIQUES


class Spells(Exporter):
    name = "spells"
    trains_causal_lms_only = True

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        return opening_comment(settings, "cast spell.txt") + f"{config.name}: {settings.micro_batch} at a time\n"


class Unspellable(MadeUp):
    def export(self, program: str) -> str:
        return f"{program} has no word for it"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with including(EXPORTERS, Spells()), including(TECHNIQUES, Unspellable()):
        yield


def spelled(folder: Path, found: Answer) -> str:
    path = folder / "best_config.json"
    emit_all(found, path)
    return exported(load_best_config(path), path, "spells")


def test_it_writes_an_answer_and_the_command_knows_its_name(tmp_path: Path) -> None:
    text = spelled(tmp_path, answer("zero3"))
    assert text.endswith("best_config.json: 4 at a time\n")
    assert "OMP_NUM_THREADS=4" in text
    assert "spells" in get_args(declared(Exported)["target"].kind.typed)


def test_what_it_cannot_write_is_refused_in_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--for spells: it trains only causal-lm models"):
        spelled(tmp_path, answer("zero3", workload={"task": "masked-lm"}))
    usual = answer("zero3")
    special = replace(usual.candidate, engine=engine_named("zero3+made-up"))
    with pytest.raises(UsageError, match="--for spells: spells has no word for it"):
        spelled(tmp_path, replace(usual, candidate=special))
