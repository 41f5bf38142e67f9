"""One run as reports need it: what was searched, measured and answered, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from ladder.candidates import Rung
from ladder.events.outcome import Record
from ladder.search.ledger import Entry, ledger
from ladder.search.policy import answer
from ladder.search.space import Space, fastest

ANSWER_NAME = "best_config.json"
"""The copy of the answer in its run folder."""


def is_simulated(facts: Mapping[str, Any]) -> bool:
    """Whether a history with these facts is of a machine that exists on paper."""
    return "simulated machine" in facts


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A tune as far as it has come. Bytes and seconds, as everywhere inside."""

    folder: Path
    space: Space
    unsupported: Mapping[Rung, str]
    records: Sequence[Record]
    trial_seconds: Mapping[str, Mapping[str, float]]
    """By trial and phase."""
    facts: Mapping[str, Any]
    """What the history says it is good for: model, GPU, versions, …"""
    config: Mapping[str, Any] | None
    """The proven answer as best_config.json has it."""
    about: Mapping[str, str] = field(default_factory=dict)
    """When it was tuned, by which command and with which driver, as far as that is known."""
    own_name: str = ""
    """What it is called beside other runs, where its folder's name does not tell it from them."""

    @property
    def name(self) -> str:
        return self.own_name or self.folder.name

    @property
    def simulated(self) -> bool:
        """Nothing was run: every figure is of a machine that exists on paper."""
        return is_simulated(self.facts)

    @property
    def rank_word(self) -> str:
        """What one rank runs on."""
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
        """The answer, or without one the fastest that fits so far."""
        return self.answer or fastest(self.records)


def named_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """`runs`, each with a name of its own: figures add up, and tables confuse, what is called alike."""
    names = _names_apart([run.folder for run in runs])
    return [replace(run, own_name=name) for run, name in zip(runs, names, strict=True)]


def _names_apart(folders: Sequence[Path]) -> list[str]:
    """A name for each of `folders`: as little of the end of its path as no other one has; one named twice is numbered.

    Links are not followed: who gives two names wants to see both.
    """
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    ends = {path: _own_end(path, set(paths) - {path}) for path in paths}
    names: list[str] = []
    for path in paths:
        name, taken = ends[path], {*ends.values(), *names}
        if paths.count(path) > 1:
            name = next(each for number in count(1) if (each := f"{ends[path]} ({number})") not in taken)
        names.append(name)
    return names


def _own_end(path: Path, others: set[Path]) -> str:
    """The shortest end of `path` that none of `others` has."""
    for length in range(1, len(path.parts)):
        end = path.parts[-length:]
        if all(other.parts[-length:] != end for other in others):
            return str(Path(*end))
    return str(path)
