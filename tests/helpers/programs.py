"""Programs of Python that run to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

BESIDE_PYTHON = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""A PATH on which the programs of this environment are found, `ladder` among them."""


def python(
    code: str,
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """What a process that runs `code` prints. It must end with `status`, if that is not None."""
    return program(sys.executable, "-c", code, *arguments, folder=folder, environment=environment, status=status)


def program(
    *command: str,
    folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """As `python`, of any `command`."""
    done = subprocess.run(
        command, check=False, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=250
    )
    assert status is None or done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done
