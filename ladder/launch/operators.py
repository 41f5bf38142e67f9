"""Builds DeepSpeed's operators before the first trial, each once, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO

# async_io takes three minutes on two cores; a compiler that hangs must not hang the tune.
_BUILD_SECONDS = 900.0
_TICK_SECONDS = 0.1


def build_operators(
    names: Iterable[str], environment: Mapping[str, str], cancelled: Callable[[], bool] = lambda: False
) -> dict[str, str | None]:
    """Compile each operator, side by side; returns, by name, None or the reason why it cannot be built.

    Ends the builds as soon as `cancelled`.
    """
    builds = {name: _Build(name, environment) for name in names}
    deadline = time.monotonic() + _BUILD_SECONDS
    try:
        while any(build.is_running() for build in builds.values()):
            if cancelled() or time.monotonic() > deadline:
                break
            time.sleep(_TICK_SECONDS)
        return {name: build.result() for name, build in builds.items()}
    finally:
        for build in builds.values():
            build.close()


class _Build:
    """One build, with its compilers in a session of their own: Ctrl-C reaches the controller alone."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ladder.trial.operators", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def result(self) -> str | None:
        if self.is_running():
            return "its build was ended before it was done"
        if self._process.returncode == 0:
            return None
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its build ended with status {self._process.returncode}"

    def close(self) -> None:
        """End what still runs: the group is ours as long as its first process is not reaped."""
        if self.is_running():
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._words.close()
