"""Writes a file with as many MiB as it is told, where it is told."""

import sys

with open(sys.argv[1], "wb") as file:
    for _ in range(int(sys.argv[2])):
        file.write(bytes(1 << 20))
