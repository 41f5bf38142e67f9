"""What keeps the trials of a user's script from the user's files: its levels, and the variables that set it."""

from __future__ import annotations

from typing import Literal

Level = Literal["overlay", "landlock", "none"]
"""overlay: what a trial writes, it alone sees, and it is thrown away. landlock: it may write only in a copy of its
working folder and in caches. none: nothing is held by the kernel."""
LEVELS: tuple[Level, ...] = ("overlay", "landlock", "none")
"""Best first."""
ASKED = "LADDER_PROTECT"
"""The variable that names the one level to use; without it, the best that works is used."""
ROOM = "LADDER_PROTECT_BYTES"
"""The variable that says how much a trial may write into its overlays, which are in memory."""
