"""What differs between the places where a tune's trials may run."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.candidates import Rung, Technique
from ladder.emit import Answer
from ladder.launch.base import Launcher
from ladder.machine.described import Machine
from ladder.options.technique_choices import TechniqueChoices
from ladder.tuning.operators import Operators
from ladder.workload.script import Script
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class OpenVenue:
    """An open venue, with what the tuner needs for trials."""

    machine: Machine
    """With the reasons for rungs that it does not support."""
    launcher: Launcher
    operators: Operators | None = None
    """DeepSpeed's; None where trials need none, as on a simulated machine."""
    clock: Callable[[], float] = time.monotonic
    """Seconds of a time budget, as the launcher counts them: without those that jobs waited in a queue."""
    swap_prefix: str = "ladder-swap"
    """The prefix of folder names on the NVMe drive."""


class Venue(ABC):
    """Where the trials of one tune run."""

    paper_name: str | None = None
    """The name of the machine on paper; None if trials are real."""
    looks_again: bool = False
    """A script can be looked at once more after the trials."""
    laws: Mapping[str, Any] | None = None
    """The description of the machine on paper, so that its history is never used for a real one."""

    @abstractmethod
    def machine(self) -> Machine:
        """The machine, limited to what the user allows."""

    @abstractmethod
    def look(self, command: Sequence[str], machine: Machine, note: Callable[[str], None]) -> Script:
        """What the user's own script trains. UsageError where it cannot be run here."""

    @abstractmethod
    def techniques(self, choices: TechniqueChoices, workload: Workload, machine: Machine) -> list[Technique]:
        """The techniques to try here. LadderError if one that was asked for cannot be used."""

    @abstractmethod
    def opened(
        self, machine: Machine, workload: Workload, rungs: Sequence[Rung], run_dir: Path
    ) -> AbstractContextManager[OpenVenue]:
        """Make the venue ready for trials; nothing of them is left when it closes."""

    def introduce(self) -> None:  # noqa: B027
        """Tell the user what they need to know about figures from here: nothing, if they are measured."""

    def signed(self, answer: Answer) -> Answer:
        """`answer` for the files, which say where its figures come from."""
        return answer

    def close(self) -> None:  # noqa: B027
        """End what `machine` began, also if the venue was never opened."""
