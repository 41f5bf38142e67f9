"""Tests on a GPU in parts: `pytest tests/gpu --part-seconds 540`, again and again until all have run at this commit.

Each part goes on where the last one ended. Results are kept in benchmarks/results/gpu-tests/, a file for each kind and
number of GPUs. A GPU may be lent for minutes only; a result is kept as soon as its test has ended.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import Bench

from ladder.launch.local import LocalLauncher
from ladder.launch.rank_environment import rank_environment
from ladder.machine.gpus import visible_gpus
from ladder.machine.machine import detect_machine

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu-tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part-seconds", type=float, metavar="SECONDS", help="keep results, and begin no test after so many seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--part-seconds") is not None:
        config.pluginmanager.register(_Part(config.getoption("--part-seconds")))


@pytest.fixture(scope="session")
def bench_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int, dict[str, Any]], AbstractContextManager[Bench]]:
    """Makes benches on the first so many GPUs, for the model of a configuration."""

    @contextmanager
    def made(gpus: int, config: dict[str, Any]) -> Iterator[Bench]:
        machine = detect_machine(gpus=gpus, gpu_memory=None, host_memory=None, nvme_path=None)
        marker = f"ladder-test-{secrets.token_hex(8)}"
        launcher = LocalLauncher(
            marker=marker,
            job={"model_config": config, "task": "causal-lm", "operators": []},
            environment=rank_environment(machine),
            log=tmp_path_factory.mktemp("server") / "server.log",
            gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
        )
        bench = Bench(launcher, [], marker)
        with closing(launcher):
            yield bench
        assert bench.processes() == []

    return made


class _Part:
    """What one call runs of the tests that have no result yet."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        names = sorted(gpu.name for gpu in visible_gpus())
        self._file = RESULTS / f"{len(names)}x {names[0] if names else 'none'}.json".replace(" ", "-").lower()
        self._commit = _commit()
        self._known: dict[str, Any] = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self._left: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has a result at this commit. What never ran comes first."""
        done = [item for item in items if self._has_run(item.nodeid)]
        left = [item for item in items if not self._has_run(item.nodeid)]
        items[:] = sorted(left, key=lambda item: item.nodeid in self._known)
        self._left = [item.nodeid for item in items]
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the result of a test."""
        if report.when == "setup":
            date = datetime.date.today().isoformat()
            self._known[report.nodeid] = {"outcome": "passed", "seconds": 0.0, "date": date, "commit": self._commit}
        told = self._known[report.nodeid]
        told["seconds"] = round(told["seconds"] + report.duration, 1)
        if report.outcome != "passed":
            told["outcome"] = report.outcome
            # Of a skip without the path of its file.
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            told["why"] = said.strip().splitlines()[-1][:300] if said else ""
        if report.when == "teardown":
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self._known, indent=2) + "\n")

    def _has_run(self, name: str) -> bool:
        return name in self._known and bool(self._known[name]["commit"] == self._commit)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """End the part once its time is over."""
        if time.monotonic() > self._ends:
            item.session.shouldstop = "the time of this part is over"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        left = [name for name in self._left if not self._has_run(name)]
        said = f"{len(left)} tests are left: run the same command again" if left else "all tests have run"
        terminalreporter.write_line(f"{said}; results in {self._file}")


def _commit() -> str:
    """What $COMMIT says, for a copy whose git does not know it; else that of the checkout."""
    done = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or done.stdout.strip() or "unknown"
