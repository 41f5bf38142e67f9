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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def ranks_in(given: str, command: Sequence[str] = (), *, must_train: bool = True) -> Iterator[str]:
    """Within it, ranks run in the environment of the interpreter `given`, or else of the one that is found.

    Found is this one if it has torch; else that of the launcher which begins the script's `command`, or the environment
    that is active. Yields what was chosen, in words. EnvironmentFaultError if none is found, or two that differ; where
    nothing is trained, as on paper, this one does.
    """
    before = os.environ.pop(VARIABLE, None)
    try:
        named = given or before
        path = _path_of(named) if named else _found(command, must_train)
        if path != sys.executable and asked(path).prefix != os.path.realpath(sys.prefix):
            os.environ[VARIABLE] = path
        if must_train and not version_of("torch"):
            raise EnvironmentFaultError(
                f"{shown(ranks_python())} has no torch; install it there, or name another one with --python."
            )
        has = {name: version_of(name) for name in ("torch", "transformers", "deepspeed")}
        versions = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in has.items())
        yield f"Ranks run in {shown(ranks_python())}: Python {python_version()}, {versions}."
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _path_of(named: str) -> str:
    named = os.path.expanduser(named)
    return os.path.abspath(shutil.which(named) or named)


def program_found(name: str) -> str | None:
    """Where the program `name` is for ranks: on PATH, or in their environment."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(ranks_python()))


def _found(command: Sequence[str], must_train: bool) -> str:
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    places = {f"of {shown(command[0])}": _of_launcher(command[0])} if command else {}
    places |= {
        name: str(Path(os.environ[name]) / "bin" / "python")
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX")
        if os.environ.get(name)
    }
    with_torch = {how: path for how, path in places.items() if path and _has_torch(path)}
    num_environments = len({asked(path).prefix for path in with_torch.values()})
    if num_environments != 1 and not must_train:
        return sys.executable
    if num_environments > 1:
        said = " and ".join(f"{shown(path)} ({how})" for how, path in with_torch.items())
        raise EnvironmentFaultError(f"Two environments have torch: {said}; name one with --python.")
    if num_environments == 0:
        raise EnvironmentFaultError(
            "No torch was found for the training: activate its environment, or name its interpreter with --python."
        )
    return next(iter(with_torch.values()))


def _has_torch(path: str) -> bool:
    try:
        return "torch" in asked(path).packages
    except EnvironmentFaultError:  # another one may have it
        return False


def _of_launcher(program: str) -> str:
    """The interpreter that the first line of a program on PATH names; empty for none."""
    found = shutil.which(program)
    if found is None or program.endswith(".py"):
        return ""
    with open(found, "rb") as file:
        first = file.readline(512)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    return words[0] if words and "python" in os.path.basename(words[0]) else ""


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
