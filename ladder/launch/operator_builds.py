"""Builds DeepSpeed's operators before the first trial, each in its own process."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import IO

import psutil

from ladder.errors import EnvironmentFaultError
from ladder.launch.modules import module_command, module_environment

_BUILD_SECONDS = 900.0
"""How long builds may take: a compiler that hangs must not block the tune. Chosen: five times the three minutes that
async_io takes on two cores (measured)."""
_TICK_SECONDS = 0.1
"""Between two checks of the builds. Chosen: a quick reaction to Ctrl-C, and negligible in a build of minutes."""


def build_operators(
    names: Iterable[str], environment: Mapping[str, str], cancelled: Callable[[], bool] = lambda: False
) -> dict[str, str | None]:
    """Compile the operators in parallel. Returns None by name, or the reason if one cannot be built.

    Stops the builds as soon as `cancelled` is true.
    """
    builds: dict[str, _Build] = {}
    deadline = time.monotonic() + _BUILD_SECONDS
    try:
        for name in names:
            builds[name] = _Build(name, environment)
        while any(build.is_running() for build in builds.values()):
            if cancelled() or time.monotonic() > deadline:
                break
            time.sleep(_TICK_SECONDS)
    finally:
        results = {name: build.end() for name, build in builds.items()}
    return results


class _Build:
    """One build. It has its own session with its compilers, so that Ctrl-C reaches only the controller."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._words = _temporary_file()  # closed by `end`
        self._process = subprocess.Popen(
            module_command("ladder.trial.operators", name, str(os.getpid())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._words,
            env=module_environment(environment),
            start_new_session=True,
        )

    def is_running(self) -> bool:
        """Whether it still runs. A build that ended is not reaped here, so that its pid is not given away."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self) -> str | None:
        """Kill what is left of the build, compilers too. Returns the reason if the operator is not built."""
        cut_short = self.is_running()
        _kill_session(self._process.pid)
        status = self._process.wait()
        with self._words as words:
            words.seek(0)
            lines = words.read().decode(errors="replace").strip().splitlines()
        if cut_short:
            return "its build was stopped before it finished"
        if status < 0:
            return f"its build was killed by signal {-status}"
        return None if status == 0 else [f"its build ended with status {status}", *lines][-1]


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise EnvironmentFaultError(
            f"A temporary file cannot be created ({error.strerror}); set TMPDIR to a folder that you can write to."
        ) from error


def _kill_session(leader: int) -> None:
    """Kill the session of a child that is not reaped yet. (ninja gives each compiler its own process group.)"""
    for _ in range(2):  # the second time for processes that started during the first
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == leader:
                    process.kill()
