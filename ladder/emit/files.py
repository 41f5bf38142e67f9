"""The paths of the emitted files, and atomic writing."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ladder.errors import EnvironmentFaultError, UsageError


@dataclass(frozen=True)
class OutputPaths:
    """The absolute paths of the configuration and its companions, which refer to each other."""

    config: Path
    trainer: Path
    accelerate: Path
    launch: Path

    @classmethod
    def beside(cls, output: Path) -> OutputPaths:
        """The four paths for `output`, such as `best_config.json`. UsageError if it cannot name a file."""
        require_file_name(output, "best_config.json")
        config = Path(os.path.abspath(output))
        # Only this suffix is removed: llama-2.7b and llama-2.13b must have different companions.
        name = config.name.removesuffix(".json")
        return cls(
            config=config,
            trainer=config.with_name(f"{name}.trainer.json"),
            accelerate=config.with_name(f"{name}.accelerate.yaml"),
            launch=config.with_name(f"{name}.launch.sh"),
        )


def require_file_name(output: Path, example: str) -> None:
    """UsageError if `output` is not the name of a file; `example` is a valid name for the message."""
    if not output.name or output.name == "..":
        raise UsageError(f"{str(output)!r} does not name a file to write; give one such as {example}.")
    if output.is_dir():
        raise UsageError(f"{str(output)!r} is a folder; name a file in it, such as {example}.")


def is_replaceable(path: Path) -> bool:
    """Whether `path` can be replaced by a new file: it does not exist, or is a regular file.

    But not the file to which our own output goes (`--output /dev/stdout >> log`), which has other content too.
    OSError if this cannot be found out.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and _own_stream(found) is None


def write_files(texts: Mapping[Path, str]) -> list[Path]:
    """Write each text to its path, in their order, so that an error with a later file cannot lose the first."""
    for path, text in texts.items():
        write_atomically(path, text, mode=0o777 if path.suffix == ".sh" else 0o666)
    return list(texts)


def keep_others(texts: Mapping[Path, str], written: Path) -> list[Path]:
    """Copy what `texts` would replace and who wrote it last is not known, as `NAME.old`; returns the copies.

    `written` is the file with the digest of what was last written to each path: what still has it may be replaced, and
    so may what would not change or has a copy. Then `written` has the digests of `texts`. EnvironmentFaultError if a
    file cannot be copied.
    """
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(written.read_text())
    kept = []
    for path, text in texts.items():
        try:
            found = path.read_bytes() if path.is_file() else b""
            is_ours = _digest(found) in (known.get(str(path)), _digest(_encoded(text)))
            copies = path.parent.glob(f"{glob.escape(path.name)}.old*")
            if found and not is_ours and not any(copy.read_bytes() == found for copy in copies):
                ends = itertools.chain([".old"], (f".old-{number}" for number in itertools.count(2)))
                names = (path.with_name(f"{path.name}{end}") for end in ends)
                kept.append(next(name for name in names if not os.path.lexists(name)))
                shutil.copy2(path, kept[-1])
        except OSError as error:
            reason = error.strerror or error
            raise EnvironmentFaultError(f"Cannot keep what {str(path)!r} has beside it: {reason}.") from error
    digests = {str(path): _digest(_encoded(text)) for path, text in texts.items()}
    with contextlib.suppress(EnvironmentFaultError):  # without it, more is kept next time
        write_atomically(written, json.dumps(known | digests))
    return kept


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path` so that there is always either the complete old file or the complete new one.

    A symbolic link is kept, and its target is written. Devices and FIFOs are written directly. The umask applies to
    `mode`. EnvironmentFaultError if it cannot be written.
    """
    try:
        if is_replaceable(path):
            _replace(Path(os.path.realpath(path)), text, mode)
        else:
            own = _own_stream(os.stat(path))
            # Our own stream is not opened again: that would overwrite the file from its start.
            with _text_to(os.open(path, os.O_WRONLY) if own is None else os.dup(own)) as stream:
                stream.write(text)
    except OSError as error:
        raise EnvironmentFaultError(f"Cannot write {str(path)!r}: {error.strerror or error}.") from error


def _replace(path: Path, text: str, mode: int) -> None:
    # In the same folder, because os.replace is atomic only within one file system.
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


def _own_stream(found: os.stat_result) -> int | None:
    """The descriptor of our stdout or stderr, if it is the file that was found."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(stream)):
                return stream
    return None


def _text_to(descriptor: int) -> TextIO:
    # surrogateescape writes undecodable bytes of a path as they are.
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape", newline="\n")


def _sync_folder(folder: Path) -> None:
    """Make the renaming durable, if the file system can sync folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
