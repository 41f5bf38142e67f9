"""`python -m ladder`: the command line, where no script of it is on PATH."""

from __future__ import annotations

import sys

from ladder.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
