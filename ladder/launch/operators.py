"""Builds DeepSpeed's operators before the first trial, each once, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping

# async_io takes three minutes on two cores; a build that hangs on a stale lock must not hang the tune.
_BUILD_SECONDS = 900.0


def build_operators(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    """Compile each operator, side by side; returns, by name, None or the reason why it cannot be built."""
    builds = {
        name: subprocess.Popen(
            [sys.executable, "-m", "ladder.trial.operators", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
        )
        for name in names
    }
    return {name: _result(build) for name, build in builds.items()}


def _result(build: subprocess.Popen[str]) -> str | None:
    try:
        _, stderr = build.communicate(timeout=_BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        build.kill()
        build.communicate()
        return f"it did not build within {_BUILD_SECONDS:.0f} s"
    if build.returncode == 0:
        return None
    return stderr.strip().splitlines()[-1] if stderr.strip() else f"its build ended with status {build.returncode}"
