"""Runs a command and puts the time, in seconds, before each line that it writes: `python stamped.py COMMAND …`."""

from __future__ import annotations

import subprocess
import sys
import time


def main() -> int:
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{time.monotonic():.4f} {line}", end="", flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
