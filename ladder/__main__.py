"""`python -m ladder`: the command line, for when the script `ladder` is not on PATH."""

from __future__ import annotations

import sys

from ladder.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
