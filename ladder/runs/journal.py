"""The Optuna journal of a run, every line with a checksum: a torn tail is dropped, damage is found and kept."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend

_CHECKSUM = "ladder_crc32"
_FOREIGN_OPERATIONS = (3, 9)
"""Attributes that optuna-dashboard writes for its own notes; whoever else writes here is damage. Defined by Optuna's
`JournalOperation`: system attributes of a study and of a trial."""


class DamagedJournalError(Exception):
    """A line in the middle is not what was written; `line` counts from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is damaged")
        self.line = line


class Journal(JournalFileBackend):
    """Optuna's own format with one key more in each line, which Optuna ignores.

    A checksum covers its line and the checksum before it, so a line that is changed, lost or moved shows.
    """

    def __init__(self, path: Path) -> None:
        """Open or create. Raises DamagedJournalError, and OSError where the file cannot be read or written."""
        drop_torn_tail(path)
        self._last = _check(path.read_bytes().splitlines(keepends=True) if path.exists() else [])
        self._path = path
        super().__init__(str(path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """All of `logs` or, with an OSError, none of them."""
        last, lines = self._last, []
        for log in logs:
            last = _checksum(log, last)
            lines.append({**log, _CHECKSUM: last})
        try:
            super().append_logs(lines)
        except OSError:
            drop_torn_tail(self._path)
            raise
        self._last = last


class ReadOnlyJournal(BaseJournalBackend):
    """A journal as it stood when it was opened. Takes no lock and writes nothing: a tune may be at work in it."""

    def __init__(self, path: Path) -> None:
        """Read all of it. Raises DamagedJournalError, and OSError where the file cannot be read."""
        data = path.read_bytes()
        lines = data[: _whole_lines(data)].splitlines(keepends=True)
        _check(lines)
        self._logs = [json.loads(line) for line in lines]

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """The lines from this one on, counted from 0."""
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Nobody who only reads does this."""
        raise RuntimeError("this journal is open for reading only")


def open_storage(journal: BaseJournalBackend) -> JournalStorage:
    """Optuna's storage over `journal`, without its notes and warnings on the user's screen."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return JournalStorage(journal)


def drop_torn_tail(path: Path) -> None:
    """Cut off what a killed writer or a power cut left of a line; what is appended next must not be glued to it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    whole = _whole_lines(data)
    if whole != len(data):
        os.truncate(path, whole)


def _whole_lines(data: bytes) -> int:
    """How many bytes of `data` are lines that were written to their end."""
    whole = data.rfind(b"\n") + 1
    last = data.rfind(b"\n", 0, max(0, whole - 1)) + 1
    # A zero byte: the file had grown, but this part of the write never reached the disk.
    return last if b"\0" in data[last:whole] else whole


def keep_copy(path: Path) -> Path:
    """A copy beside `path` under a name that no file has; the one from before if it holds the same."""
    number = 1
    while (copy := path.with_name(f"{path.name}.damaged-{number}")).exists():
        if copy.read_bytes() == path.read_bytes():
            return copy
        number += 1
    shutil.copy2(path, copy)
    return copy


def _check(lines: Sequence[bytes]) -> int:
    """The last checksum. Raises DamagedJournalError at the first line that is not as it was written."""
    last = 0
    for number, line in enumerate(lines, start=1):
        log = _parse(line)
        if log is None:
            raise DamagedJournalError(number)
        found = log.pop(_CHECKSUM, None)
        if found is None and log.get("op_code") in _FOREIGN_OPERATIONS:
            continue
        last = _checksum(log, last)
        if found != last:
            raise DamagedJournalError(number)
    return last


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        log = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return log if isinstance(log, dict) else None


def _checksum(log: dict[str, Any], before: int) -> int:
    return zlib.crc32(json.dumps(log, separators=(",", ":")).encode(), before)
