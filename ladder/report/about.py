"""The command, the date and the driver of a tune, which are stored in its run folder for reports."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ladder.emit.files import write_atomically

ABOUT_NAME = "about.json"
_COMMAND = "ladder"


def note_about(folder: Path, *, on_gpus: bool) -> dict[str, str]:
    """Write about.json into the run folder, and return its content."""
    now = datetime.datetime.now(datetime.timezone.utc)
    facts = {"date": f"{now:%Y-%m-%d %H:%M} UTC"}
    if (command := command_line(sys.argv)) is not None:
        facts["command"] = command
    if on_gpus and (driver := _driver()) is not None:
        facts["NVIDIA driver"] = driver
    write_atomically(folder / ABOUT_NAME, json.dumps(facts, indent=2) + "\n")
    return facts


def read_about(folder: Path) -> dict[str, str]:
    """The content of about.json; empty if there is none, as during a tune."""
    try:
        facts = json.loads((folder / ABOUT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}


def command_line(arguments: Sequence[str]) -> str | None:
    """The command to repeat the tune; None if a script or a notebook called ladder."""
    if not arguments or Path(arguments[0]).name != _COMMAND:
        return None
    return shlex.join([_COMMAND, *arguments[1:]])


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
