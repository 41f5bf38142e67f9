"""Checks before any trial that a tune can write its files, so that hours of trials are not lost."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ladder.emit.config import SECTION
from ladder.emit.files import OutputPaths, is_replaceable
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.options.tune import TuneOptions
from ladder.simulation.paper_machine import machine_files
from ladder.text import shown
from ladder.units import MIB
from ladder.workload.workload import ModelShape

_DEFAULTS = Path("ladder.yaml")
"""The file in the current folder from which the command line reads defaults."""
_ANSWER_BYTES = MIB
"""How much of a file is read to see whether it is an answer. Chosen: many times the size of any best_config.json."""


def read_files(options: TuneOptions, model: ModelShape) -> list[Path]:
    """The user's own files that a tune reads."""
    files = [_DEFAULTS]
    if model.source in ("file", "folder"):
        files.append(Path(options.model) / ("config.json" if model.source == "folder" else ""))
    if options.machine is not None:
        files.append(machine_files().get(options.machine.lower()) or Path(options.machine))
    return files


def require_writable(output: Path, read: Sequence[Path]) -> None:
    """UsageError or EnvironmentFaultError if the answer and its companions cannot be written to `output`, or would
    replace one of the files in `read` or a file that is not an answer.
    """
    option = f"--output {shown(output)}"
    try:
        if output.is_dir():
            raise _no_place(option)
        paths = OutputPaths.beside(output)
        _require_place(paths.config, option, read)
        for companion in (paths.trainer, paths.accelerate, paths.launch):
            _require_place(companion, f"{option}: its companion {shown(companion.name)}", read)
        if output.exists() and not os.access(output, os.W_OK):
            raise EnvironmentFaultError(f"{option} exists and is read-only; choose another name.")
        if output.exists() and not _is_answer_or_empty(output):
            raise UsageError(f"{option} exists and was not written by ladder; choose another name or remove it.")
    except OSError as error:  # a parent folder that may not be entered, or a loop of symbolic links
        raise _no_place(option, f" ({error.strerror})") from None


def _require_place(path: Path, name: str, read: Sequence[Path]) -> None:
    """Check that a file can be written to `path` without replacing one of `read`; messages call it `name`."""
    if path.is_dir():
        raise _no_place(name)
    if not is_replaceable(path):
        raise UsageError(
            f"{name} is not a regular file, or is where ladder's own output goes, so it cannot be replaced; "
            "choose another name such as best_config.json."
        )
    target = Path(os.path.realpath(path))  # a symbolic link is kept, and its target is written
    for file in read:
        if os.path.realpath(file) == str(target):
            raise UsageError(f"{name} would replace {shown(file)}, which ladder reads; choose another name.")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise _no_place(name)


def _no_place(name: str, reason: str = "") -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"{name} cannot be written{reason}; choose a file in an existing folder that you can write to."
    )


def _is_answer_or_empty(file: Path) -> bool:
    """Whether `file` may be replaced: it is empty, or the answer of an earlier tune, even if edited since."""
    with file.open("rb") as stream:
        data = stream.read(_ANSWER_BYTES)
    if not data:
        return True
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and isinstance(document.get(SECTION), dict)


def require_folder(save_weights: Path) -> None:
    """Create the folder if need be. EnvironmentFaultError if it cannot be written: the proof would fail otherwise."""
    try:
        save_weights.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save_weights):
            pass
    except OSError as error:
        raise EnvironmentFaultError(
            f"--save-weights {shown(save_weights)} cannot be written ({error.strerror}); choose a folder that you can "
            "write to."
        ) from None
