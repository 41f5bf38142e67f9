"""Modules of ours as programs: how trial server, operator builds and the doctor's question to torch are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# What `-m` does, but for the current folder, which it puts first: that may be a model's, with a psutil.py of its own.
# (Python 3.11 has -P for this, 3.10 has nothing.) The folder of this package comes last, for a ladder that is not
# installed but run from its checkout.
_RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; del sys.argv[:2]; "
    "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_PACKAGES = str(Path(__file__).parents[2])


def module_command(name: str, *arguments: str) -> list[str]:
    """Runs a module of ours as a program that no file of the current folder is part of."""
    return [sys.executable, "-c", _RUN_MODULE, _PACKAGES, name, *arguments]


def module_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Ours with `changes`, for `module_command`: without PYTHONPATH's empty entries, which are the current folder."""
    environment = {**os.environ, **changes}
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, environment["PYTHONPATH"].split(os.pathsep)))
    return environment
