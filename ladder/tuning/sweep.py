"""What a tune left when it was killed: its processes and its swap files. Nothing without its marker is touched."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from ladder.launch.trial_server import kill_marked


def run_marker(run_folder: Path) -> str:
    """What every process and swap file of a run is known by: the same whenever the run is started again.

    Of the folder itself and not of its name alone: containers that see each other's processes have folders of one name.
    """
    identity = f"{run_folder.stat().st_ino}:".encode() + os.fsencode(run_folder.resolve())
    return "ladder-" + hashlib.sha256(identity).hexdigest()[:16]


class Sweep:
    """For one run folder, which remembers every NVMe path that its tunes used."""

    def __init__(self, marker: str, run_folder: Path) -> None:
        self._marker, self._list = marker, run_folder / "nvme_paths.json"

    def __call__(self) -> None:
        """End the processes and remove the swap files that carry the marker."""
        kill_marked(self._marker)
        for folder in self._paths():
            for leftover in folder.glob(f"{self._marker}-*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def remember(self, nvme_path: Path) -> None:
        """Sweep `nvme_path` too, from now on and in every later tune of the run folder."""
        paths = self._paths()
        if nvme_path not in paths:
            self._list.write_text(json.dumps([str(path) for path in (*paths, nvme_path)]), encoding="utf-8")

    def _paths(self) -> list[Path]:
        try:
            paths = json.loads(self._list.read_bytes())
        except (OSError, ValueError):  # none used so far, or killed while it wrote the first
            return []
        return [Path(path) for path in paths if isinstance(path, str)] if isinstance(paths, list) else []
