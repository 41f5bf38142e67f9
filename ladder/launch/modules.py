"""Starts modules of ladder as programs: the trial server, the operator builds and the doctor's check of torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ladder.machine.cache import cache_folder

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
    if _has_no_bytecode("torch") and "PYTHONPYCACHEPREFIX" not in environment:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(cache_folder() / "bytecode")
    return environment


def _has_no_bytecode(package: str) -> bool:
    """Whether Python compiles all of `package` at each import, and keeps nothing of it.

    So it is in container images that pip or uv filled without compiling, if they set PYTHONDONTWRITEBYTECODE or cannot
    be written. Imports then take 11 s instead of 5 s (measured on a host with an H100).
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return False
    kept = Path(importlib.util.cache_from_source(found.origin))
    is_writable = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
    return not kept.exists() and not is_writable
