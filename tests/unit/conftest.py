"""What unit tests are given, and what they may not do: start a process, or a whole tune on paper."""

from __future__ import annotations

import os
import subprocess
from typing import Any, NoReturn

import pytest

from ladder.simulation.launcher import SimulatedLauncher


@pytest.fixture(autouse=True)
def _pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests stay fast: what takes a process or a tune belongs in tests/process or tests/simulated."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError("a unit test starts neither a process nor a trial on paper")

    if "LADDER_COUNT" not in os.environ:
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(SimulatedLauncher, "run", refuse)
