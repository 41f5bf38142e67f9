"""A look at processes: a command that is run and watched, a launcher on the test bench."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ladder.events.protocol import RUN_MARKER, Event, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener


@dataclass
class Finished:
    """A command that ended, and what was seen of it."""

    status: int
    output: str
    errors: str
    num_marked: int
    """The most processes that carried the run's marker at once."""
    num_left: int
    """Descendants that outlived it."""


def ladder(*arguments: str, folder: Path, is_offline: bool = True, python: str = sys.executable) -> Finished:
    """Run the command line in `folder`. Its descendants are known by a variable that they inherit."""
    variable, value = "LADDER_TEST_MARKER", secrets.token_hex(8)
    with (folder / "stdout.txt").open("w") as stdout, (folder / "stderr.txt").open("w") as stderr:
        process = subprocess.Popen(
            [python, "-m", "ladder.cli.main", *arguments],
            cwd=folder,
            env={**os.environ, variable: value, "HF_HUB_OFFLINE": str(int(is_offline)), "COLUMNS": "160"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    num_marked = 0
    while process.poll() is None:
        num_marked = max(num_marked, sum(RUN_MARKER in _environment(each) for each in processes_with(variable, value)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
    left = processes_with(variable, value)
    for survivor in left:
        survivor.kill()
    output, errors = ((folder / name).read_text() for name in ("stdout.txt", "stderr.txt"))
    return Finished(process.returncode, output, errors, num_marked, len(left))


def rank_alone() -> dict[str, str]:
    """The environment of a program that is one CPU rank by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return os.environ | own | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """The living processes that have had `variable`=`value` in their environment from their start."""
    return [process for process in psutil.process_iter() if _environment(process).get(variable) == value]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except (psutil.Error, OSError):
        return {}


def _parent(process: psutil.Process) -> psutil.Process | None:
    """None for a process that has ended since it was listed."""
    try:
        return process.parent()
    except psutil.NoSuchProcess:
        return None


@dataclass
class Bench:
    """A launcher on the test bench: it can be cancelled, and what it keeps running can be counted."""

    launcher: Launcher
    cancellation: list[bool]
    marker: str
    events: list[tuple[int, Event]] = field(default_factory=list)
    has_processes: bool = True
    """Whether its ranks are processes of this host."""

    def run(
        self, spec: TrialSpec, also: Listener = lambda rank, event: None, deadlines: Deadlines | None = None
    ) -> TrialRun:
        self.events.clear()
        self.cancellation.clear()

        def listen(rank: int, event: Event) -> None:
            self.events.append((rank, event))
            also(rank, event)

        return self.launcher.run(spec, deadlines or Deadlines(), listen)

    def cancel(self) -> None:
        self.cancellation.append(True)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that the launcher started; an agent on a node has no marker, but what it starts has."""
        return [each for each in psutil.process_iter() if self._is_marked(each)]

    def ranks(self) -> list[psutil.Process]:
        """Those of them that belong to a trial: all but the servers that a warm launcher keeps."""
        return [each for each in self.processes() if (parent := _parent(each)) is not None and self._is_marked(parent)]

    def _is_marked(self, process: psutil.Process) -> bool:
        """Nodes add their names to the marker."""
        found = _environment(process).get(RUN_MARKER, "")
        return found == self.marker or found.startswith(f"{self.marker}-")

    def server(self) -> psutil.Process:
        """The trial server of a local launcher."""
        (server,) = [process for process in self.processes() if _parent(process) == psutil.Process()]
        return server

    def rank(self, rank: int) -> psutil.Process:
        """One rank of the trial that runs: they are forked in order."""
        return sorted(self.server().children(), key=lambda process: (process.create_time(), process.pid))[rank]


def is_alive(process: psutil.Process) -> bool:
    """A zombie that init has not reaped yet is not: it holds nothing."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
