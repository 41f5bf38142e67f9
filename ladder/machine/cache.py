"""Where ladder keeps what it finds out once, for all tunes of this user."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """LADDER_CACHE in the environment, or else `ladder` in the user's cache; it need not exist yet."""
    if own := os.environ.get("LADDER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ladder"


def keep(file: Path, content: Mapping[str, Any]) -> bool:
    """Write `content` as JSON, whole or not at all; False where the folder cannot be written."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        with open(descriptor, "w", encoding="utf-8") as written:
            json.dump(content, written, indent=1)
        os.replace(name, file)
        return True
    return False
