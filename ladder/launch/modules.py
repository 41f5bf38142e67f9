"""Starts modules of ladder as programs: the trial server, the operator builds and the doctor's check of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Like `python -m`, but without the current folder on sys.path: it may be a model's folder with a psutil.py in it.
# (Python 3.11 has -P for this, 3.10 has nothing.) The folder of this package is added at the end, so that a checkout
# works without being installed.
_RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; del sys.argv[:2]; "
    "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_PACKAGES = str(Path(__file__).parents[2])


def module_command(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of ladder as a program, which imports nothing from the current folder."""
    return [sys.executable, "-c", _RUN_MODULE, _PACKAGES, name, *arguments]


def module_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Our environment with `changes`, for `module_command`. Empty entries of PYTHONPATH mean the current folder, so
    they are removed."""
    environment = {**os.environ, **changes}
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, environment["PYTHONPATH"].split(os.pathsep)))
    return environment
