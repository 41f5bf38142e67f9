"""Removes what a killed tune left: its processes and swap files. Nothing without the tune's marker is touched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from ladder.launch.trial_server import kill_marked


def run_marker(run_folder: Path) -> str:
    """The marker of a run's processes and swap files; it is the same each time the run is started.

    It depends on the inode and not on the path alone: containers that see each other's processes may use equal paths.
    """
    identity = f"{run_folder.stat().st_ino}:".encode() + os.fsencode(run_folder.resolve())
    return "ladder-" + hashlib.sha256(identity).hexdigest()[:16]


class Sweep:
    """Cleans up for one run folder, in which it remembers every NVMe path that its tunes used."""

    def __init__(self, marker: str, run_folder: Path) -> None:
        self._marker, self._list = marker, run_folder / "nvme_paths.json"

    def __call__(self) -> None:
        """End the processes and remove the swap files that carry the marker."""
        kill_marked(self._marker)
        for folder in self._paths():
            for leftover in folder.glob(f"{self._marker}-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def remember(self, nvme_path: Path) -> None:
        """Clean up in `nvme_path` too, from now on and in every later tune of the run folder."""
        paths = self._paths()
        if nvme_path not in paths:
            self._list.write_text(json.dumps([str(path) for path in (*paths, nvme_path)]), encoding="utf-8")

    def _paths(self) -> list[Path]:
        try:
            paths = json.loads(self._list.read_bytes())
        except (OSError, ValueError):  # there is none, or ladder was killed while writing the first
            return []
        return [Path(path) for path in paths if isinstance(path, str)] if isinstance(paths, list) else []
