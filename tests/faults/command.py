"""The command line as a process that tests may interrupt and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from helpers import TINY_CONFIG, processes_with

from ladder.events.protocol import RUN_MARKER
from ladder.launch.sweep import run_marker

TUNE = ["tune", "./model", "--gpus", "0", "--seq-len", "64", "--global-batch-size", "4", "--gpu-memory", "1GiB"]
TUNE += ["--micro-batch", "1", "--run-dir", "run", "--strategy", "reverse"]
TUNE += ["--rung", "zero0", "--rung", "zero1", "--rung", "zero2", "--rung", "zero3"]


@dataclass
class Command:
    """`ladder tune` on a tiny model in `folder`; every process of its run is known by the run's marker."""

    process: subprocess.Popen[bytes]
    folder: Path
    terminal: int | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def marked(self) -> list[psutil.Process]:
        """Server and ranks that are alive."""
        return processes_with(RUN_MARKER, run_marker(self.run_dir)) if self.run_dir.exists() else []

    def is_compiling(self) -> bool:
        """Whether a compiler of the run is alive."""
        names = []
        for process in self.marked():
            with suppress(psutil.NoSuchProcess):
                names.append(process.name())
        return any("cc1plus" in name for name in names)

    def output(self) -> str:
        return (self.folder / "stdout.txt").read_text()

    def errors(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    def has_reached(self, phase: str) -> bool:
        """Whether both ranks of a trial have come to `phase`."""
        sought = f'"phase":"{phase}"'.encode()
        files = (self.run_dir / "trials").glob("*/rank1.jsonl")
        return any(sought in file.read_bytes() for file in files)

    def trials(self, *, comparisons: bool = True) -> list[str]:
        """The first candidate of each trial that was begun, in order; with those that compare losses, if wanted."""
        specs = [_read(spec) for spec in sorted((self.run_dir / "trials").glob("*/spec.json"))]
        return [spec["candidates"][0]["key"] for spec in specs if spec and (comparisons or not spec["parity"])]


def _read(spec: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(spec.read_text())
        return content
    except ValueError:
        return None  # the controller was killed while it wrote


@contextmanager
def started(
    folder: Path,
    *,
    terminal: bool = False,
    arguments: list[str] = TUNE,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Command]:
    """Runs the command; with `terminal`, as the foreground job of a terminal of its own. Leaves nothing of it."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(TINY_CONFIG))
    ours, theirs = os.openpty() if terminal else (None, None)
    # The tests may be started by nohup or in the background, where these are ignored, which a process inherits.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGINT)}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("steady_ladder.py")), *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdin=theirs if terminal else subprocess.DEVNULL,
        stdout=(folder / "stdout.txt").open("wb"),
        stderr=(folder / "stderr.txt").open("wb"),
        start_new_session=True,
    )
    for number, handler in before.items():
        signal.signal(number, handler)
    if theirs is not None:
        os.close(theirs)
    command = Command(process, folder, ours)
    try:
        yield command
    finally:
        process.kill()
        process.wait()
        for survivor in command.marked():
            survivor.kill()
        if command.terminal is not None:
            os.close(command.terminal)
