"""Starts modules of ladder as programs: the trial server, the operator builds and the doctor's check of torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ladder.launch.secrets import blanked_secrets
from ladder.machine.cache import cache_folder
from ladder.machine.interpreter import is_own, packages_folder, ranks_python

# Like `python -m`, but without the current folder on sys.path: it may be a model's folder with a psutil.py in it.
# (Python 3.11 has -P for this, 3.10 has nothing.) The folder of this package is added at the end, so that a checkout
# works without being installed; in another environment, which may have another release of ladder, it comes first.
_RUN_MODULE = (
    "import sys; rest = [*filter(None, sys.path)]; sys.path[:] = {order}; del sys.argv[:2]; "
    "import runpy; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_LAST, _FIRST = (_RUN_MODULE.format(order=order) for order in ("[*rest, sys.argv[1]]", "[sys.argv[1], *rest]"))
_PACKAGES = str(Path(__file__).parents[2])


def module_command(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of ladder as a program, which imports nothing from the current folder.

    The ranks' side runs in their own environment, which need not be this one.
    """
    if name.startswith("ladder.trial."):
        code = _LAST if is_own() else _FIRST
        return [ranks_python(), "-c", code, packages_folder(cache_folder()), name, *arguments]
    return [sys.executable, "-c", _LAST, _PACKAGES, name, *arguments]


def asked(
    name: str, *arguments: str, seconds: float, changes: Mapping[str, str] = MappingProxyType({}), told: str = ""
) -> str:
    """What the module says as a program that is `told` something, within so many seconds.

    OSError or subprocess.SubprocessError if it does not. `changes` as for `module_environment`.
    """
    return subprocess.run(
        module_command(name, *arguments),
        env=module_environment(changes),
        input=told,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=True,
    ).stdout


def module_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Our environment without secrets and with `changes`, for `module_command`. Empty entries of PYTHONPATH mean the
    current folder, so they are removed."""
    environment = _with_programs({**os.environ, **blanked_secrets(os.environ), **changes})
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, environment["PYTHONPATH"].split(os.pathsep)))
    if _has_no_bytecode("torch") and "PYTHONPYCACHEPREFIX" not in environment:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(cache_folder() / "bytecode")
    return environment


def training_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Our environment with `changes`, for a training in the ranks' environment, which need not have ladder."""
    environment = _with_programs({**os.environ, **changes})
    if not is_own():
        before = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (packages_folder(cache_folder()), before)))
    return environment


def _with_programs(environment: dict[str, str]) -> dict[str, str]:
    """With the programs of the ranks' environment first, as ninja, with which torch compiles operators."""
    if is_own():
        return environment
    path = os.path.dirname(ranks_python()), environment.get("PATH", os.defpath)
    return environment | {"PATH": os.pathsep.join(path)}


def _has_no_bytecode(package: str) -> bool:
    """Whether Python compiles all of `package` at each import, and keeps nothing of it.

    So it is in container images that pip or uv filled without compiling, if they set PYTHONDONTWRITEBYTECODE or cannot
    be written. Imports then take 11 s instead of 5 s (measured on a host with an H100).
    """
    found = importlib.util.find_spec(package) if is_own() else None
    if found is None or found.origin is None:
        return False
    kept = Path(importlib.util.cache_from_source(found.origin))
    is_writable = not sys.dont_write_bytecode and os.access(Path(found.origin).parent, os.W_OK)
    return not kept.exists() and not is_writable
