"""One run as reports need it: what was searched, measured and answered, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ladder.candidates import Rung
from ladder.outcome import Record
from ladder.search.ledger import Entry, ledger
from ladder.search.policy import answer
from ladder.search.space import Space, ranking

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

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def simulated(self) -> bool:
        """Nothing was run: every figure is of a machine that exists on paper."""
        return is_simulated(self.facts)

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
        return self.answer or next(iter(ranking(self.records)), None)
