"""The controller's end of the trial server: starts it, talks to it, and sees that nothing of it is left."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ladder.errors import EnvironmentFaultError, ModelNotAccessibleError
from ladder.events.protocol import RUN_MARKER
from ladder.launch.modules import module_command, module_environment
from ladder.text import shown

_START_SECONDS = 180.0
"""To import what trials need. Chosen: eight times the 23 s of the slowest host so far (measured:
benchmarks/results/4xh200-beyond-the-ladder)."""
_END_SECONDS = 5.0
"""For the server to end, and then for its ranks to be gone. Chosen: the server gives its ranks 3 s
(`ladder/trial/server.py`)."""
_TICK_SECONDS = 0.1
"""Chosen: short beside a start of several seconds."""
_REASON_CHARACTERS = 200
"""Of the server's own words in an error. Chosen: about two lines of a terminal."""


class TrialServer:
    """One server process. `marker` is in the environment of all its descendants.

    The thread that makes it must live until it is ready: the kernel ends an importing server with that thread.
    """

    def __init__(self, *, marker: str, job: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> None:
        self.marker = marker
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                module_command("ladder.trial.server"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=module_environment({**environment, RUN_MARKER: marker}),
                start_new_session=True,  # a terminal's Ctrl-C is the controller's alone to handle
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._buffer = b""
        self._ready = False
        self._send(job)  # not as an argument, which the kernel limits to 128 KiB: a model's labels can be longer
        self._ranks: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything is imported; False if `cancelled` came first.

        Raises EnvironmentFaultError with the reason why it cannot be, ModelNotAccessibleError if that is the model.
        """
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and not cancelled() and (events := self.poll(_TICK_SECONDS)) is not None:
            for event in events:
                if event["event"] == "ready":
                    self._ready = True
                    return True
                self.close()
                reason = shown(event["reason"].partition("\n")[0])[:_REASON_CHARACTERS]
                if event["of_model"]:
                    first = reason.partition(". ")[0]  # the second sentence lists every model there is
                    raise ModelNotAccessibleError(
                        f"The installed transformers does not know this model ({first}); upgrade it, or mend the "
                        "model's configuration."
                    )
                raise EnvironmentFaultError(f"Trials cannot start here: {reason} (details in {self._log}).")
        self.close()
        if cancelled():
            return False
        raise EnvironmentFaultError(f"The trial server did not start; its last words are in {self._log}.")

    def load(self, operators: Sequence[str]) -> None:
        """Say which operators to load, to a server that was made without them in its job."""
        self._send({"operators": list(operators)})

    def start(self, trial: str, spec: Path) -> None:
        self._send({"op": "start", "trial": trial, "spec": str(spec)})

    def kill_ranks(self) -> None:
        self._send({"op": "kill"})

    def poll(self, seconds: float) -> list[dict[str, Any]] | None:
        """Events that come within `seconds`, perhaps none; None once the server is gone."""
        if not select.select([self._stdout], [], [], seconds)[0]:
            return []
        data = os.read(self._stdout, 65536)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "started":
                self._ranks = {rank: it for rank, pid in enumerate(event["pids"]) if (it := _process(pid)) is not None}
        return events

    def is_stopped(self, rank: int) -> bool:
        """Whether somebody stopped the rank's process (SIGSTOP, a debugger)."""
        try:
            return self._ranks[rank].status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except (psutil.Error, KeyError):
            return False

    def close(self) -> list[int]:
        """End the server and all it started. Returns the pids that the kernel has not ended even so, mostly none."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()  # the end of its stdin is the server's order to kill its ranks and end
        try:
            self._process.wait(timeout=_END_SECONDS if self._ready else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # still importing: it has nothing to put in order
            self._process.wait()
        kill_marked(self.marker)
        # A rank that is being killed has no environment left to be found by, but is not gone yet.
        return [rank.pid for rank in wait_gone(list(self._ranks.values()), _END_SECONDS)]

    def _send(self, request: Mapping[str, Any]) -> None:
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:  # a pipe may take less than all of it when a signal comes
                line = line[os.write(self._stdin, line) :]
        except BrokenPipeError:
            return  # `poll` will say that the server is gone


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def kill_marked(marker: str) -> int:
    """Kill every process of this user that carries `marker` from its start, but not this one; returns how many.

    The marker is read again through psutil's pid-and-start-time check at the moment of the signal, so a pid that was
    given to somebody else in between is left alone.
    """
    victims = [process for process in psutil.process_iter() if process.pid != os.getpid() and _carries(process, marker)]
    for process in victims:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    wait_gone(victims, _END_SECONDS)
    return len(victims)


def wait_gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for the end of `processes`; returns those that are left. A zombie is gone: it holds nothing."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if _is_there(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _carries(process: psutil.Process, marker: str) -> bool:
    try:
        return process.uids().real == os.getuid() and process.environ().get(RUN_MARKER) == marker
    except (psutil.Error, OSError):
        return False
