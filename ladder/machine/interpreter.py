"""The interpreter that ranks run in, and what is installed for it: this one, or that of another environment."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ladder.errors import EnvironmentFaultError
from ladder.text import shown

VARIABLE = "LADDER_PYTHON"
"""Names another interpreter for the ranks, for all processes of a tune."""
OLDEST = (3, 10)
"""Chosen: Python 3.10 brought dataclasses with `kw_only`, which cross from process to process."""
_SECONDS = 60.0
"""For an interpreter to say what it has. Chosen: on a busy network file system, listing packages takes ten."""

_ASK = """
import json, re, sys
from importlib import metadata
packages = {}
for each in metadata.distributions():  # the first of a name is the one that is imported
    packages.setdefault(re.sub(r"[-_.]+", "-", each.metadata["Name"] or "").lower(), each.version)
print("\\nladder:" + json.dumps({"version": list(sys.version_info[:3]), "prefix": sys.prefix, "packages": packages}))
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """What an interpreter says of itself."""

    prefix: str
    """The folder of its environment."""
    version: str
    packages: dict[str, str] = field(hash=False)
    """Versions, by the names of installed distributions as PEP 503 writes them."""


def ranks_python() -> str:
    """The interpreter of the ranks."""
    return os.environ.get(VARIABLE) or sys.executable


def is_own() -> bool:
    """Whether ranks run in the environment of this process."""
    return ranks_python() == sys.executable


def version_of(distribution: str) -> str:
    """That of an installed distribution in the ranks' environment; empty if there is none."""
    if not is_own():
        return asked(ranks_python()).packages.get(re.sub(r"[-_.]+", "-", distribution).lower(), "")
    return own_version_of(distribution)


def own_version_of(distribution: str) -> str:
    """The same in ladder's own environment."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def python_version() -> str:
    return platform.python_version() if is_own() else asked(ranks_python()).version


def has_module(name: str) -> bool:
    """Whether ranks can import the module `name`, which is not imported here."""
    if is_own():
        return importlib.util.find_spec(name) is not None
    return _finds(ranks_python(), name)


@functools.cache
def asked(path: str) -> Interpreter:
    """What the interpreter at `path` says of itself. EnvironmentFaultError, in a sentence, if no rank can run in it."""
    said = _run(path, _ASK)
    try:
        about = json.loads(said.rpartition("\nladder:")[2])  # an environment may print at start-up
    except ValueError:
        raise EnvironmentFaultError(f"{shown(path)} is no Python interpreter; name one with --python.") from None
    version = ".".join(map(str, about["version"]))
    if tuple(about["version"][:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EnvironmentFaultError(f"{shown(path)} is Python {version}, and ladder trains with {oldest} or later.")
    return Interpreter(prefix=os.path.realpath(about["prefix"]), version=version, packages=about["packages"])


@functools.cache
def _finds(path: str, module: str) -> bool:
    code = f"from importlib.util import find_spec; print(find_spec({module!r}) is not None)"
    return _run(path, code).split()[-1:] == ["True"]


def _run(path: str, code: str) -> str:
    """What the program prints. EnvironmentFaultError if it does not run."""
    # Without the current folder on sys.path: it may have a json.py in it.
    code = f"import sys; sys.path[:] = [each for each in sys.path if each]\n{code}"
    try:
        done = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise EnvironmentFaultError(f"There is no interpreter {shown(path)}; name one with --python.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFaultError(f"{shown(path)} cannot be run ({error}); name another one with --python.") from None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise EnvironmentFaultError(f"{shown(path)} cannot be run ({shown(said)}); name another one with --python.")
    return done.stdout


def program_found(name: str) -> str | None:
    """Where the program `name` is for ranks: on PATH, or in their environment."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(ranks_python()))


def packages_folder(cache: Path) -> str:
    """A folder for the ranks' sys.path with this package, and with nothing else.

    That from which we were imported may have foreign binaries in it, for another version of Python.
    """
    package = Path(__file__).parents[1]
    if is_own():
        return str(package.parent)
    folder = cache.absolute() / "ranks" / re.sub(r"\W+", "-", str(package)).strip("-")
    link = folder / package.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(package)
    except FileExistsError:  # another tune was faster
        pass
    except OSError as error:
        raise EnvironmentFaultError(
            f"ladder's own files cannot be shown to {shown(ranks_python())}, as {shown(folder)} cannot be written "
            f"({error.strerror}); set LADDER_CACHE to a folder that can."
        ) from None
    return str(folder)
