"""Print the reference of all commands and options: `python scripts/reference.py > docs/reference.md`."""

from __future__ import annotations

from ladder.cli.main import app
from ladder.cli.reference import reference

if __name__ == "__main__":
    print(reference(app), end="")
