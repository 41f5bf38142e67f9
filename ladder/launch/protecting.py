"""Which protection trials of a script have on this host, in words."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from ladder.errors import EnvironmentFaultError
from ladder.events.protection import ASKED, Level
from ladder.launch.modules import asked

_SECONDS = 60.0
"""Chosen: two hundred times what it takes on an idle machine."""
WORDS: dict[Level, str] = {
    "overlay": "What it writes in the look and in trials is thrown away, caches apart.",
    "landlock": "In the look and in trials it runs in a copy of this folder and may write nowhere else, caches apart.",
    "none": "Warning: nothing here keeps your files from the script. What it deletes and overwrites before its "
    "training, the look and each trial really delete and overwrite (`ladder doctor` says why).",
}


@dataclass(frozen=True)
class Protection:
    level: Level
    why: str
    """Why it is no better one."""


def protection_here() -> Protection:
    """The best level that works here, or the one that the user asked for. EnvironmentFaultError if that does not work.

    Another process tries it: it makes a view and writes in it.
    """
    try:
        found = json.loads(asked("ladder.trial.protection.level", seconds=_SECONDS))
    except subprocess.SubprocessError as error:
        return Protection(level="none", why=f"the process that tries it failed: {error}")
    if found["level"] is None:
        raise EnvironmentFaultError(f"The protection that {ASKED} asks for does not work here ({found['why']}).")
    return Protection(**found)
