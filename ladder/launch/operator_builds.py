"""Builds DeepSpeed's operators, each in its own process."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from typing import IO

import psutil

from ladder.errors import EnvironmentFaultError
from ladder.launch.modules import module_command, module_environment

_BUILD_SECONDS = 900.0
"""How long builds may take: a compiler that hangs must not block the tune. Chosen: five times the three minutes that
async_io takes on two cores (measured)."""
_NICE = 10
"""How far a build stands back behind trials that run beside it. Chosen: to a tenth of their share of a core."""
_TICK_SECONDS = 0.1
"""Between two checks of the builds. Chosen: a quick reaction to Ctrl-C, and negligible in a build of minutes."""


class OperatorBuilds:
    """Builds of operators, side by side with each other and with trials."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._running: dict[str, _Build] = {}
        self._ended: dict[str, str | None] = {}
        """None by name, or the reason why it is not built."""

    def begin(self, names: Iterable[str], *, beside_trials: bool = False) -> list[str]:
        """Start the builds that were not started yet. Returns their names."""
        new = [name for name in names if name not in self._running and name not in self._ended]
        for name in new:
            self._running[name] = _Build(name, self._environment, _NICE if beside_trials else 0)
        return new

    def have_ended(self, names: Iterable[str]) -> bool:
        """Whether nobody has to wait for these builds. One that was not started has not ended."""
        return all(
            name in self._ended or (name in self._running and not self._running[name].is_running()) for name in names
        )

    def wait(self, names: Sequence[str], cancelled: Callable[[], bool] = lambda: False) -> dict[str, str | None]:
        """Wait until these builds have ended. Returns None by name, or the reason if one cannot be built.

        Stops them as soon as `cancelled` is true.
        """
        builds = {name: self._running[name] for name in names if name in self._running}
        deadline = time.monotonic() + _BUILD_SECONDS
        try:
            while any(build.is_running() for build in builds.values()):
                if cancelled() or time.monotonic() > deadline:
                    break
                time.sleep(_TICK_SECONDS)
        finally:
            self._end(builds)
        return {name: self._ended[name] for name in names}

    def close(self) -> None:
        """Stop the builds that still run."""
        self._end(dict(self._running))

    def _end(self, builds: Mapping[str, _Build]) -> None:
        for name, build in builds.items():
            self._ended[name] = build.end()
            del self._running[name]


def build_operators(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    """Build the operators in parallel; as `OperatorBuilds.wait`."""
    with closing(OperatorBuilds(environment)) as builds:
        builds.begin(names)
        return builds.wait(names, lambda: False)


class _Build:
    """One build. It has its own session with its compilers, so that Ctrl-C reaches only the controller."""

    def __init__(self, name: str, environment: Mapping[str, str], nice: int) -> None:
        self._words = _temporary_file()  # closed by `end`
        self._process = subprocess.Popen(
            module_command("ladder.trial.operators", name, str(os.getpid()), str(nice)),
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
