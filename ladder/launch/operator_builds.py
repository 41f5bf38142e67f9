"""Builds DeepSpeed's operators before the first trial, each once, in a process of its own."""

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
"""A compiler that hangs must not hang the tune. Chosen: five times what async_io takes on two cores, which is three
minutes (measured)."""
_TICK_SECONDS = 0.1
"""Chosen: short for whoever presses Ctrl-C, and next to nothing beside a build of minutes."""


def build_operators(
    names: Iterable[str], environment: Mapping[str, str], cancelled: Callable[[], bool] = lambda: False
) -> dict[str, str | None]:
    """Compile each operator, side by side; returns, by name, None or the reason why it cannot be built.

    Ends the builds as soon as `cancelled`.
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
    """One build, with its compilers in a session of their own: Ctrl-C reaches the controller alone."""

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
        """Whether it is; its end is looked at and not taken, so that its session stays ours."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self) -> str | None:
        """End what is left of it, also compilers that outlived their build; returns the reason if it is not built."""
        cut_short = self.is_running()
        _kill_session(self._process.pid)
        status = self._process.wait()
        with self._words as words:
            words.seek(0)
            lines = words.read().decode(errors="replace").strip().splitlines()
        if cut_short:
            return "its build was ended before it was done"
        if status < 0:
            return f"its build was killed by signal {-status}"
        return None if status == 0 else [f"its build ended with status {status}", *lines][-1]


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise EnvironmentFaultError(
            f"A temporary file cannot be made ({error.strerror}); set TMPDIR to a folder that can be written."
        ) from error


def _kill_session(leader: int) -> None:
    """Kill the session of a child that is not reaped yet: ninja puts each compiler into a process group of its own."""
    for _ in range(2):  # once more for what was started while we looked
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == leader:
                    process.kill()
