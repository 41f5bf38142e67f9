"""A script that starts its training in a process of its own, in which nobody could take hold of it."""

from __future__ import annotations

import inspect
import multiprocessing.process
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import PrepareForLaunch
from torch.distributed.launcher.api import elastic_launch

from ladder.errors import UsageError
from ladder.text import shown
from ladder.trial.script.hold import Grip, NotTakenHoldOfError
from ladder.trial.script.program import program_of
from ladder.trial.wrapping import wrap

_TRAINS = re.compile(r"\w*Trainer\b|\b(?:accelerate|deepspeed)\b")
"""In a program that may train; others are left to the script."""
_STEPS = re.compile(rf"{_TRAINS.pattern}|\.(?:train|backward)\(")
"""In a function that may train."""
_ONLY_START_OTHERS = ("torch.", "multiprocessing.", "accelerate.", "datasets.")
"""Modules whose functions a process may run though the words above are in them: they call what they were given. Other
installed modules are no exception, as some train themselves."""
_SHELLS = ("sh", "bash", "zsh", "dash")


def refuse_training_elsewhere(grip: Grip) -> None:
    """From now on the process ends, with a report, where it would start a program that trains."""

    def started(own: Any, process: Any, *arguments: Any, **options: Any) -> None:
        _refuse(grip, options["args"] if "args" in options else arguments[0])
        own(process, *arguments, **options)

    def called(own: Any, command: str) -> int:
        _refuse(grip, command)
        return int(own(command))

    def replaced(own: Any, path: Any, words: Any, *more: Any, **options: Any) -> Any:
        _refuse(grip, words)
        return own(path, words, *more, **options)

    def begun(own: Any, process: Any) -> None:
        for each in (process._target, *process._args[:1]):  # torch's spawn gives the function to one of its own
            if isinstance(each, PrepareForLaunch):
                _refuse_function(grip, each.launcher)
            if inspect.isfunction(each) and _may_step(each):
                _refuse_function(grip, each)
        own(process)

    def launched(own: Any, launcher: Any, *arguments: Any) -> None:
        if callable(launcher._entrypoint):
            _refuse_function(grip, launcher._entrypoint)
        _leave(grip, [launcher._entrypoint, *arguments])

    wrap(subprocess.Popen, "__init__", started)
    wrap(os, "system", called)
    for name in ("execv", "execve", "posix_spawn", "posix_spawnp"):
        wrap(os, name, replaced)
    wrap(multiprocessing.process.BaseProcess, "start", begun)
    wrap(elastic_launch, "__call__", launched)  # torchrun within the script, and accelerate's notebook_launcher


def _refuse_function(grip: Grip, function: Any) -> None:
    said = f"it starts its training, {function.__name__}(), in a process of its own; let the script call it itself, "
    grip.leave(NotTakenHoldOfError(f"{said}because ladder starts a process for each GPU"))


def _may_step(function: Callable[..., Any]) -> bool:
    if function.__module__.startswith(_ONLY_START_OTHERS):
        return False
    try:
        return bool(_STEPS.search(inspect.getsource(function)))
    except (OSError, TypeError):
        return False


def _refuse(grip: Grip, command: Any) -> None:
    words = words_of(command)
    if any(may_train(each) for each in (words, *_within_a_shell(words))):
        _leave(grip, words)


def _leave(grip: Grip, words: Sequence[str]) -> None:
    said = f"it starts its training in a process of its own; give that command behind --: {shown(' '.join(words))}"
    grip.leave(NotTakenHoldOfError(said))


def _within_a_shell(words: Sequence[str]) -> list[list[str]]:
    """The commands that a shell is told, in a file or after `-c`."""
    if len(words) < 2 or Path(words[0]).name not in _SHELLS:
        return []
    if words[1] == "-c":
        return [words_of(line) for line in " ".join(words[2:3]).splitlines()]
    try:
        return [words_of(line) for line in Path(words[1]).read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return []


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
