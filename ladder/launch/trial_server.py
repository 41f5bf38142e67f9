"""The controller's side of the trial server: starts it, talks to it and ends it with all its processes."""

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
"""How long the imports may take. Chosen: eight times the 23 s of the slowest host so far (measured:
benchmarks/results/4xh200-beyond-the-ladder)."""
_END_SECONDS = 5.0
"""How long the server may take to end, and then its ranks. Chosen: the server gives its ranks 3 s
(`ladder/trial/server.py`)."""
_TICK_SECONDS = 0.1
"""Between two checks of a starting server. Chosen: short compared with a start of several seconds."""
_REASON_CHARACTERS = 200
"""Of the server's reason in an error message. Chosen: about two lines of a terminal."""


class TrialServer:
    """One server process. `marker` is in the environment of all its descendants.

    The thread that creates it must live until it is ready: the kernel kills a server that still imports when that
    thread ends.
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
                start_new_session=True,  # only the controller handles Ctrl-C
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
        """Wait until everything is imported; False if `cancelled` is true before that.

        Raises ModelNotAccessibleError if transformers does not know the model, and EnvironmentFaultError if the server
        cannot start for another reason.
        """
        return self._await("ready", cancelled)

    def load(self, operators: Sequence[str], cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Load operators that are built, for all trials from now on; as `wait_ready`."""
        self._send({"op": "load", "operators": list(operators)})
        return self._await("loaded", cancelled)

    def _await(self, expected: str, cancelled: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and not cancelled() and (events := self.poll(_TICK_SECONDS)) is not None:
            for event in events:
                if event["event"] == expected:
                    self._ready = True
                    return True
                self.close()
                reason = shown(event["reason"].partition("\n")[0])[:_REASON_CHARACTERS]
                if event["of_model"]:
                    first = reason.partition(". ")[0]  # the second sentence lists every model there is
                    raise ModelNotAccessibleError(
                        f"The installed transformers does not know this model ({first}); upgrade it, or correct the "
                        "model's config.json."
                    )
                raise EnvironmentFaultError(f"Trials cannot start here: {reason} (details in {self._log}).")
        self.close()
        if cancelled():
            return False
        raise EnvironmentFaultError(f"The trial server did not start; see the end of {self._log}.")

    def start(self, trial: str, spec: Path, *, again: bool = False) -> None:
        """Start a trial: in new processes or, `again`, in those that stayed after another one."""
        self._send({"op": "start", "trial": trial, "spec": str(spec), "again": again})

    def kill_ranks(self) -> None:
        self._send({"op": "kill"})

    def poll(self, seconds: float) -> list[dict[str, Any]] | None:
        """Events that arrive within `seconds`, possibly none; None once the server has ended."""
        if not select.select([self._stdout], [], [], seconds)[0]:
            return []
        data = os.read(self._stdout, 65536)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "started":
                pids = {int(rank): pid for rank, pid in event["pids"].items()}  # JSON has no numbers as keys
                self._ranks = {rank: it for rank, pid in pids.items() if (it := _process(pid)) is not None}
        return events

    def is_stopped(self, rank: int) -> bool:
        """Whether the rank's process is stopped (by SIGSTOP or a debugger)."""
        try:
            return self._ranks[rank].status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except (psutil.Error, KeyError):
            return False

    def close(self) -> list[int]:
        """End the server and all it started. Returns the pids of processes that could not be killed, usually none."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()  # when its stdin ends, the server kills its ranks and ends
        try:
            self._process.wait(timeout=_END_SECONDS if self._ready else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it is still importing and has nothing to clean up
            self._process.wait()
        kill_marked(self.marker)
        # A rank that is being killed no longer has an environment with the marker, but may still exist.
        return [rank.pid for rank in wait_gone(list(self._ranks.values()), _END_SECONDS)]

    def _send(self, request: Mapping[str, Any]) -> None:
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:  # a signal may interrupt a write, which then writes only a part
                line = line[os.write(self._stdin, line) :]
        except BrokenPipeError:
            return  # `poll` will report that the server has ended


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def marked(marker: str, variable: str = RUN_MARKER) -> list[psutil.Process]:
    """Every other process of this user that was started with `marker` in this `variable` of its environment."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _carries(process, marker, variable)
    ]


def kill_marked(marker: str, variable: str = RUN_MARKER) -> int:
    """Kill all that `marked` finds; returns how many.

    psutil compares pid and start time again before it sends the signal, so a process that got the pid of one that ended
    in between is not touched.
    """
    victims = marked(marker, variable)
    for process in victims:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    wait_gone(victims, _END_SECONDS)
    return len(victims)


def wait_gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until `processes` have ended; returns those that are left. A zombie has ended: it holds no resources."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if _is_there(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _carries(process: psutil.Process, marker: str, variable: str) -> bool:
    try:
        return process.uids().real == os.getuid() and process.environ().get(variable) == marker
    except (psutil.Error, OSError):
        return False
