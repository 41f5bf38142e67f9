"""Where the emitted files go, and how they are written: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

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
        return cls(
            config=config,
            trainer=config.with_name(f"{config.stem}.trainer.json"),
            accelerate=config.with_name(f"{config.stem}.accelerate.yaml"),
            launch=config.with_name(f"{config.stem}.launch.sh"),
        )


def require_file_name(output: Path, example: str) -> None:
    """UsageError where no file can be written as `output`; `example` is a name that could."""
    if not output.name or output.name == "..":
        raise UsageError(f"{str(output)!r} does not name a file to write; give one such as {example}.")
    if output.is_dir():
        raise UsageError(f"{str(output)!r} is a folder; name a file in it, such as {example}.")


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path` so that a reader, or a crash at any moment, sees the old file or the new one, never half.

    `mode` is lowered by the process's umask, as for any new file. EnvironmentFaultError where it cannot be written.
    """
    # In the same folder: os.replace is atomic within one file system only.
    temporary = path.with_name(f".ladder-{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            # surrogateescape: a path of undecodable bytes goes into the file as those bytes.
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise EnvironmentFaultError(f"Cannot write {str(path)!r}: {error.strerror or error}.") from error


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself durable, where the file system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
