"""Holds a GiB of memory, then runs the script that its arguments name."""

import runpy
import sys

held = bytearray(1 << 30)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
