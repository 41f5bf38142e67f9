"""A script that starts its training in a process of its own, in which nobody could take hold of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

from ladder.errors import UsageError
from ladder.text import shown
from ladder.trial.script.hold import Grip, NotTakenHoldOfError
from ladder.trial.script.program import program_of
from ladder.trial.wrapping import wrap

_TRAINS = re.compile(r"\w*Trainer\b|\b(?:accelerate|deepspeed)\b")
"""In a program that may train; others are left to the script."""


def refuse_training_elsewhere(grip: Grip) -> None:
    """From now on the process ends, with a report, where it would start a program that trains."""

    def started(own: Any, process: Any, command: Any, *arguments: Any, **options: Any) -> None:
        _refuse(grip, command)
        own(process, command, *arguments, **options)

    def called(own: Any, command: str) -> int:
        _refuse(grip, command)
        return int(own(command))

    wrap(subprocess.Popen, "__init__", started)
    wrap(os, "system", called)


def _refuse(grip: Grip, command: Any) -> None:
    words = words_of(command)
    if may_train(words):
        said = f"it starts its training in a process of its own; give that command behind --: {shown(' '.join(words))}"
        grip.leave(NotTakenHoldOfError(said))


def words_of(command: Any) -> list[str]:
    """Of whatever a process may be started with; none for what no shell would understand."""
    if isinstance(command, str | bytes | os.PathLike):
        try:
            return shlex.split(os.fsdecode(command))
        except ValueError:
            return []
    return [os.fsdecode(word) for word in command]


def may_train(words: Sequence[str]) -> bool:
    """Whether `words` start a Python program with a word of training in it."""
    try:
        return bool(_TRAINS.search(program_of(words).file.read_text(encoding="utf-8", errors="replace")))
    except (UsageError, ImportError, ValueError, OSError, SystemExit):
        return False
