"""Where a tune will write, looked at before any trial: hours of them must not end at a file that cannot be written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ladder.emit.config import SECTION
from ladder.emit.files import OutputPaths, is_replaceable
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.simulation.paper_machine import machine_files
from ladder.text import shown
from ladder.tuning.options import TuneOptions
from ladder.units import MIB
from ladder.workload.workload import ModelShape

_DEFAULTS = Path("ladder.yaml")
"""What the command line reads its defaults from, in the folder where it is started."""
_ANSWER_BYTES = MIB
"""Chosen: many times what any best_config.json has."""


def read_files(options: TuneOptions, model: ModelShape) -> list[Path]:
    """The user's own files that a tune is started from."""
    files = [_DEFAULTS]
    if model.source in ("file", "folder"):
        files.append(Path(options.model) / ("config.json" if model.source == "folder" else ""))
    if options.machine is not None:
        files.append(machine_files().get(options.machine.lower()) or Path(options.machine))
    return files


def require_writable(output: Path, read: Sequence[Path]) -> None:
    """UsageError or EnvironmentFaultError where the answer and its companions cannot be written as `output`, or would
    replace one of `read` or a file that is no answer.
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
            raise UsageError(f"{option} exists and is no answer that ladder wrote; choose another name or remove it.")
    except OSError as error:  # a folder on the way that may not be entered, or links that lead in a circle
        raise _no_place(option, f" ({error.strerror})") from None


def _require_place(path: Path, name: str, read: Sequence[Path]) -> None:
    """A file can be written as `path`, and none of `read` is lost by it; messages call it `name`."""
    if path.is_dir():
        raise _no_place(name)
    if not is_replaceable(path):
        raise UsageError(
            f"{name} is no regular file, or is where ladder's own output goes, and neither can be replaced by a file; "
            "choose another name such as best_config.json."
        )
    target = Path(os.path.realpath(path))  # a link stays: where it leads, the file is written
    for file in read:
        if os.path.realpath(file) == str(target):
            raise UsageError(f"{name} would replace {shown(file)}, which ladder reads; choose another name.")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise _no_place(name)


def _no_place(name: str, reason: str = "") -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"{name} cannot be written{reason}; choose a file in a folder that exists and is yours."
    )


def _is_answer_or_empty(file: Path) -> bool:
    """Whether an answer may replace it; one of an earlier tune may, even if it was edited."""
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
    """Made if need be. A proof whose weights cannot be saved would be taken for one that failed."""
    try:
        save_weights.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=save_weights):
            pass
    except OSError as error:
        raise EnvironmentFaultError(
            f"--save-weights {shown(save_weights)} cannot be written ({error.strerror}); choose a folder that is yours."
        ) from None
