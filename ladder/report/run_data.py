"""The data of one run for reports: the space, the records and the answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ladder.events.outcome import Record
from ladder.runs.stored_run import StoredRun
from ladder.search.ledger import Entry, ledger
from ladder.search.policy import answer
from ladder.search.space import fastest

ANSWER_NAME = "best_config.json"
"""The copy of the answer in its run folder."""


def is_simulated(facts: Mapping[str, Any]) -> bool:
    """Whether a history with these facts is of a simulated machine."""
    return "simulated machine" in facts


@dataclass(frozen=True, kw_only=True)
class ReportedRun(StoredRun):
    """What reports show of a tune."""

    folder: Path
    config: Mapping[str, Any] | None
    """The content of the answer's best_config.json."""
    about: Mapping[str, str] = field(default_factory=dict)
    """The date, the command and the driver, as far as known."""
    own_name: str = ""
    """A name that distinguishes it from other runs, if its folder's name does not."""

    @property
    def name(self) -> str:
        return self.own_name or self.folder.name

    @property
    def simulated(self) -> bool:
        """Whether trials were simulated."""
        return is_simulated(self.facts)

    @property
    def rank_word(self) -> str:
        """The word for what a rank runs on."""
        return "GPU" if self.space.device == "cuda" else "CPU rank"

    @cached_property
    def entries(self) -> list[Entry]:
        return ledger(self.space, self.records, self.unsupported, on_paper=self.simulated)

    @cached_property
    def answer(self) -> Record | None:
        """The proof of the winner."""
        return answer(self.records)

    @cached_property
    def best(self) -> Record | None:
        """The answer, or else the fastest candidate that fits so far."""
        return self.answer or fastest(self.records)


def named_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """`runs` with distinct names: runs with equal names would be mixed up in figures and tables.

    A name is the path from the folder that they have in common; equal paths are numbered. Symbolic links are not
    resolved: a user who gives two names wants to see both.
    """
    paths = [os.path.abspath(run.folder) for run in runs]
    top = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    names: list[str] = []
    for place, path in enumerate(paths):
        before = paths[:place].count(path)
        names.append(os.path.relpath(path, top) + (f" ({before + 1})" if before else ""))
    return [replace(run, own_name=name) for run, name in zip(runs, names, strict=True)]
