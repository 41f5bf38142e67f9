"""Where the emitted files go, and how they are written: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ladder.errors import EnvironmentFaultError, UsageError


@dataclass(frozen=True)
class OutputPaths:
    """The configuration and its companions, all absolute: the files refer to each other from any folder."""

    config: Path
    trainer: Path
    accelerate: Path
    launch: Path

    @classmethod
    def beside(cls, output: Path) -> OutputPaths:
        """The four paths for `output`, such as `best_config.json`. UsageError if it cannot name a file."""
        require_file_name(output, "best_config.json")
        config = Path(os.path.abspath(output))
        # No other suffix: llama-2.7b and llama-2.13b have companions of their own.
        name = config.name.removesuffix(".json")
        return cls(
            config=config,
            trainer=config.with_name(f"{name}.trainer.json"),
            accelerate=config.with_name(f"{name}.accelerate.yaml"),
            launch=config.with_name(f"{name}.launch.sh"),
        )


def require_file_name(output: Path, example: str) -> None:
    """UsageError where no file can be written as `output`; `example` is a name that could."""
    if not output.name or output.name == "..":
        raise UsageError(f"{str(output)!r} does not name a file to write; give one such as {example}.")
    if output.is_dir():
        raise UsageError(f"{str(output)!r} is a folder; name a file in it, such as {example}.")


def is_replaceable(path: Path) -> bool:
    """Whether a file can take the place of what `path` leads to: of nothing or another file, of no device or FIFO.

    Nor of the file that our own output goes to (`--output /dev/stdout >> log`), which holds more than this one text.
    OSError where it cannot be known.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and _own_stream(found) is None


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path` so that a reader, or a crash at any moment, sees the old file or the new one, never half.

    A symbolic link stays, and the file it leads to is written. What is not replaceable takes the text as it comes.
    `mode` is lowered by the process's umask, as for any new file. EnvironmentFaultError where it cannot be written.
    """
    try:
        if is_replaceable(path):
            _replace(Path(os.path.realpath(path)), text, mode)
        else:
            _write_in_place(path, text)
    except OSError as error:
        raise EnvironmentFaultError(f"Cannot write {str(path)!r}: {error.strerror or error}.") from error


def _replace(path: Path, text: str, mode: int) -> None:
    # In the same folder: os.replace is atomic within one file system only.
    temporary = path.with_name(f".ladder-{secrets.token_hex(8)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _text_to(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)) as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _write_in_place(path: Path, text: str) -> None:
    own = _own_stream(os.stat(path))
    # Our own is not opened anew: that would write from the file's start, over what is there.
    with _text_to(os.open(path, os.O_WRONLY) if own is None else os.dup(own)) as stream:
        stream.write(text)


def _own_stream(found: os.stat_result) -> int | None:
    """Our stdout or stderr, if that is what was found."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(stream)):
                return stream
    return None


def _text_to(descriptor: int) -> TextIO:
    # surrogateescape: a path of undecodable bytes goes into the file as those bytes.
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape", newline="\n")


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself durable, where the file system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
