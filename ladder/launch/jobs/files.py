"""What the two ends of a job's pipes share: files in a folder that all nodes see, each with one writer."""

from __future__ import annotations

import secrets
from pathlib import Path

END = b"\x04"
"""The last byte of a pipe. The pipes carry JSON, in which it cannot stand."""
POLL_SECONDS = 0.05
"""Between two looks at a file. Chosen: short beside a trial of seconds, and few requests to a shared file system."""
ALIVE_SECONDS = 5.0
"""Between two signs of life of the tune. Chosen."""
SILENT_SECONDS = 60.0
"""A job ends itself after this silence of the tune. Chosen: file systems of a busy cluster stall for some 30 s."""


def requests(folder: Path, node: int) -> Path:
    """What the agent on the job's `node` is told."""
    return folder / f"requests-{node}"


def events(folder: Path, node: int) -> Path:
    """What the agent on the job's `node` answers."""
    return folder / f"events-{node}"


def alive(folder: Path) -> Path:
    """A file whose content changes as long as the tune is alive."""
    return folder / "alive"


def create(folder: Path, nodes: int) -> None:
    """Make the folder with all its files: NFS remembers for a while that a file does not exist.

    Whoever can write there can run programs in the job, so it is private.
    """
    folder.mkdir(mode=0o700)
    for node in range(nodes):
        requests(folder, node).touch()
        events(folder, node).touch()
    say_alive(folder)


def say_alive(folder: Path) -> None:
    """Change the file that shows that the tune is alive."""
    alive(folder).write_text(secrets.token_hex(8), encoding="utf-8")


def append(path: Path, data: bytes) -> None:
    """Add `data`. It is closed again: other hosts see only what was written before a file was closed."""
    with path.open("ab") as file:
        file.write(data)


class Appended:
    """Reads what is appended to a file. It is opened each time: NFS looks for news only then."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.is_over = False
        """The end has been read."""

    def read(self) -> bytes:
        """What is new, possibly nothing."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        data, end, _ = data.partition(END)
        self.is_over = bool(end)
        return data
