"""A program on a node of a Ray cluster, with its stdin and stdout here: for Ray what ssh is for a host.

    python -m ladder.launch.nodes.ray_pipe --list                       the nodes, one JSON object a line
    python -m ladder.launch.nodes.ray_pipe NODE-ID GPUS PROGRAM …       run a program there

An actor on the node starts the program and carries the bytes. Ray ends the actor when this process ends, for whatever
reason; the program's stdin then ends, and so does an agent.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_WAIT_SECONDS = 0.5
"""How long the actor waits for output before it answers that there is none. Chosen: few calls, and no delay."""
_SAID_BYTES = 4000
"""Of the program's stderr, told when it ends. Chosen: several lines of an error."""


class Carrier:
    """The actor: one program and its pipes. `write` and `read` are called from two threads of the caller."""

    def __init__(self, program: list[str], folder: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the actor lives
        self._process = subprocess.Popen(
            program, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )

    def write(self, data: bytes) -> None:
        """To the program's stdin; nothing ends it."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, which `read` tells
            if data:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def read(self) -> bytes | None:
        """What the program has written by now, possibly nothing; None once it has ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _WAIT_SECONDS)[0]:
            return b""
        return os.read(self._process.stdout.fileno(), 1 << 16) or None

    def said(self) -> bytes:
        """The end of its stderr."""
        self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _SAID_BYTES))
        return self._errors.read()


def carry(node: str, gpus: float, program: list[str]) -> int:
    """Run `program` on the node with that id, and carry its stdin, stdout and stderr."""
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    remote: Any = ray.remote(Carrier)
    options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": place}
    actor = remote.options(**options, max_concurrency=2).remote(program, os.getcwd())
    threading.Thread(target=_feed, args=(actor,), daemon=True).start()
    while (data := ray.get(actor.read.remote())) is not None:
        while data:
            data = data[os.write(1, data) :]
    sys.stderr.buffer.write(ray.get(actor.said.remote()))
    return 0


def _feed(actor: Any) -> None:
    """Hand stdin over, in order: each piece once the one before has been written."""
    while data := os.read(0, 1 << 16):
        ray.get(actor.write.remote(data))
    ray.get(actor.write.remote(b""))


def main() -> int:
    """See the module."""
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    if sys.argv[1:] == ["--list"]:
        for node in ray.nodes():
            if node["Alive"]:
                gpus = node["Resources"].get("GPU", 0.0)
                print(json.dumps({"id": node["NodeID"], "name": node["NodeManagerHostname"], "gpus": gpus}))
        return 0
    node, gpus, *program = sys.argv[1:]
    return carry(node, float(gpus), program)


if __name__ == "__main__":
    sys.exit(main())
