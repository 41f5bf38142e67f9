"""From a test to the inside of a server or rank: see `inside`."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from helpers import Bench


@dataclass(frozen=True)
class Provocation:
    """Makes a process do what a function of `inside` does."""

    file: Path

    def __call__(self, process: psutil.Process, fault: str) -> None:
        self.happened_file.unlink(missing_ok=True)
        self.file.write_text(fault)
        process.send_signal(signal.SIGUSR1)

    @property
    def happened_file(self) -> Path:
        return self.file.with_suffix(".happened")

    def happened(self) -> list[str]:
        """What the fault left as proof that it happened."""
        return self.happened_file.read_text().splitlines() if self.happened_file.exists() else []


@dataclass
class FaultyBench(Bench):
    """A bench whose processes do on request what no test can do to them from outside."""

    provoke: Provocation = field(kw_only=True)
