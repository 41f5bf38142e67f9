"""The Optuna journal of a run with a checksum in every line, so that damage is detected."""

from __future__ import annotations

import json
import os
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
"""Operations with which optuna-dashboard stores notes; other lines without a checksum are damage. Defined by Optuna's
`JournalOperation`: system attributes of a study and of a trial."""


class DamagedJournalError(Exception):
    """A line is not as it was written; `line` counts from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is damaged")
        self.line = line


class Journal(JournalFileBackend):
    """Optuna's format with one more key in each line, which Optuna ignores.

    A checksum covers its line and the checksum before it, so changed, lost and moved lines are detected.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. DamagedJournalError if it is damaged, OSError if it cannot be read or written."""
        drop_torn_tail(path)
        self._last = _check(path.read_bytes().splitlines(keepends=True) if path.exists() else [])
        self._path = path
        super().__init__(str(path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append all of `logs` or, with an OSError, none of them."""
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
    """The journal at the time of opening. Takes no lock and writes nothing, because a tune may be running."""

    def __init__(self, path: Path) -> None:
        """Read the file. DamagedJournalError if it is damaged, OSError if it cannot be read."""
        data = path.read_bytes()
        lines = data[: _whole_lines(data)].splitlines(keepends=True)
        _check(lines)
        self._logs = [json.loads(line) for line in lines]

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """The lines from this one on, counted from 0."""
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Always a RuntimeError."""
        raise RuntimeError("this journal is open for reading only")


def open_storage(journal: BaseJournalBackend) -> JournalStorage:
    """Optuna's storage for `journal`, without Optuna's log messages and warnings."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return JournalStorage(journal)


def drop_torn_tail(path: Path) -> None:
    """Remove an incomplete last line, left by a killed process or a power cut, before something is appended to it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    whole = _whole_lines(data)
    if whole != len(data):
        os.truncate(path, whole)


def _whole_lines(data: bytes) -> int:
    """How many bytes of `data` are complete lines."""
    whole = data.rfind(b"\n") + 1
    last = data.rfind(b"\n", 0, max(0, whole - 1)) + 1
    # A zero byte means that the file had grown, but this part did not reach the disk.
    return last if b"\0" in data[last:whole] else whole


def _check(lines: Sequence[bytes]) -> int:
    """The last checksum. DamagedJournalError for the first line that is not as it was written."""
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
