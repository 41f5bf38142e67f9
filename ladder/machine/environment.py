"""Which environment the ranks of a command run in: the one that the user names, or the one that is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ladder.errors import EnvironmentFaultError
from ladder.machine.interpreter import VARIABLE, asked, python_version, ranks_python, version_of
from ladder.machine.versions import RANGES, is_within
from ladder.text import shown


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
        has = {name: version_of(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}
        if must_train:
            _require_known({name: has[name] for name in ("torch", "transformers", "accelerate")})
        versions = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in has.items())
        yield f"Ranks run in {shown(ranks_python())}: Python {python_version()}, {versions}."
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def _require_known(versions: Mapping[str, str]) -> None:
    """EnvironmentFaultError if a package that every rank imports is missing, or of a version that is not known here."""
    for name, version in versions.items():
        if not version:
            raise EnvironmentFaultError(
                f"{shown(ranks_python())} has no {name}; install it there, or name another one with --python."
            )
        if not is_within(version, RANGES[name]):
            raise EnvironmentFaultError(
                f"{shown(ranks_python())} has {name} {version}, and ladder trains with {name} {RANGES[name]}; install "
                "that there, or name another one with --python."
            )


def _path_of(named: str) -> str:
    named = os.path.expanduser(named)
    return os.path.abspath(shutil.which(named) or named)


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
