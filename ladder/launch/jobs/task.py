"""What a job runs on each of its nodes: the agent, with its pipes in files. submitit calls `serve` there."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from ladder.launch.jobs.files import (
    ALIVE_SECONDS,
    END,
    POLL_SECONDS,
    SILENT_SECONDS,
    Appended,
    alive,
    append,
    events,
    requests,
)
from ladder.launch.modules import module_command, module_environment

_END_SECONDS = 8.0
"""How long the agent may take to end. Chosen: its trial server takes up to 5 s."""

_TELL_SECONDS = 2.0
"""For its last words to be written. Chosen: a process that outlives it may hold its stdout open for ever."""


def serve(folder: str, place: str, *interpreter: str) -> None:
    """Run the agent of this node in the folder `place` until the tune ends or is silent for too long.

    `interpreter` is that of the ranks, if they have another one.
    """
    # submitit has Slurm send it before the time is up, to all processes, and it would end every rank.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    node = int(os.environ["SLURM_PROCID"])
    said = events(Path(folder), node)
    agent = subprocess.Popen(
        module_command("ladder.launch.nodes.agent", *interpreter),
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=module_environment({}),
    )
    teller = threading.Thread(target=_tell, args=(agent, said), daemon=True)
    teller.start()
    try:
        _feed(agent, Path(folder), node)
    finally:
        assert agent.stdin is not None
        with suppress(BrokenPipeError):
            agent.stdin.close()
        try:
            agent.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
        teller.join(timeout=_TELL_SECONDS)


def _tell(agent: subprocess.Popen[bytes], file: Path) -> None:
    assert agent.stdout is not None
    while data := os.read(agent.stdout.fileno(), 1 << 16):
        append(file, data)
    append(file, END)


def _feed(agent: subprocess.Popen[bytes], folder: Path, node: int) -> None:
    """Hand over requests until there are no more, the agent has ended, or the tune gives no sign of life."""
    assert agent.stdin is not None
    wanted, sign = Appended(requests(folder, node)), b""
    heard = looked = float("-inf")
    while agent.poll() is None and not wanted.is_over:
        data = wanted.read()
        with suppress(BrokenPipeError):
            agent.stdin.write(data)
            agent.stdin.flush()
        time_now = time.monotonic()
        if time_now - looked > ALIVE_SECONDS:
            looked, (before, sign) = time_now, (sign, alive(folder).read_bytes())
            heard = time_now if sign != before else heard
            if time_now - heard > SILENT_SECONDS:
                return
        time.sleep(POLL_SECONDS)
