"""The controller's side of one agent: starts it on its node, talks to it, and ends it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ladder.errors import EnvironmentFaultError
from ladder.launch.modules import module_command, module_environment
from ladder.launch.nodes.network import ALIVE_SECONDS, DOUBT_SECONDS, answering, own_addresses
from ladder.launch.watch import now
from ladder.machine.interpreter import is_own, ranks_python
from ladder.machine.lease import InterruptedWaitError
from ladder.text import shown

_START_SECONDS = 60.0
"""How long a node may take to start its agent. Chosen: Python from a slow shared file system takes some 20 s."""
_ANSWER_SECONDS = 120.0
"""For a request. Chosen: the slowest, to describe a node with an NVMe drive, takes some 10 s."""
_SILENT_SECONDS = 15.0
"""After this silence of its agent a node counts as lost, though its host answers. Chosen: much longer than a host that
runs out of memory holds up a program."""
_TURN_SECONDS = 1.0
"""If more than this passes between two looks, the controller itself was stopped, and the silence does not count.
Chosen: a look takes milliseconds, and it looks many times a second."""
_END_SECONDS = 8.0
"""How long an agent may take to end. Chosen: its trial server takes up to 5 s."""
_SAID_CHARACTERS = 200
"""Of what ssh, srun or the agent said last, in an error. Chosen: about two lines of a terminal."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node and how a program is started on it."""

    name: str
    command: Callable[[Sequence[str]], list[str]]
    """From what is to run there to what is run here; its stdin and stdout are the program's."""
    end: Callable[[str], None] = lambda step: None
    """Ends the step of a program that no longer listens."""


class Connection:
    """One agent. EnvironmentFaultError names the node if it does not start, does not answer, or cannot do something."""

    def __init__(self, node: Node, cancelled: Callable[[], bool]) -> None:
        self.name = node.name
        self._node, self._cancelled = node, cancelled
        self._buffer, self._step = b"", ""
        self._heard = self._looked = now()
        self._is_here = False
        self._silent, self._is_cut_off, self._is_lost = 0.0, False, False
        self._writing, self._closed = threading.Lock(), threading.Event()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        self._process = subprocess.Popen(
            node.command(module_command("ladder.launch.nodes.agent", *([] if is_own() else [ranks_python()]))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=module_environment(os.environ),  # ssh may need a secret
            start_new_session=True,  # only the controller handles Ctrl-C
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.ahead = 0.0
        """Seconds by which the node's clock is ahead of ours."""

    def wait_here(self) -> None:
        """Wait until the agent is there, and compare its clock with ours."""
        late = f"did not start ladder within {_START_SECONDS:.0f} s"
        here = self._await(["here"], _START_SECONDS, late)
        self._step, self._is_here = here["step"], True
        asked = now()
        then = self.ask("clock", "clock")["now"]
        self.ahead = then - (asked + now()) / 2
        self.send("watch", addresses=own_addresses())
        threading.Thread(target=self._stay_in_touch, args=(here["addresses"],), daemon=True).start()

    def ask(self, op: str, expected: str, **content: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.send(op, **content)
        return self.wait_for(expected)

    def wait_for(self, *expected: str, seconds: float = _ANSWER_SECONDS) -> dict[str, Any]:
        """The answer to a request that was sent: the first event that is one of `expected`."""
        return self._await(expected, seconds, f"did not answer within {seconds:.0f} s")

    def send(self, op: str, **content: Any) -> None:
        """Send a request. If the agent has ended, `poll` will say so."""
        line = json.dumps({"op": op, **content}).encode() + b"\n"
        with self._writing, suppress(BrokenPipeError):
            while line and not self._closed.is_set():
                line = line[os.write(self._stdin, line) :]

    def poll(self) -> list[dict[str, Any]] | None:
        """What the agent has said, possibly nothing; None once it has ended, or has been silent for too long."""
        time_now = now()
        self._heard += max(0.0, time_now - self._looked - _TURN_SECONDS)
        self._looked = time_now
        if not select.select([self.stdout], [], [], 0)[0]:
            self._silent = time_now - self._heard
            is_gone = self._silent > (DOUBT_SECONDS if self._is_cut_off else _SILENT_SECONDS)
            self._is_lost = self._is_here and is_gone
            return None if self._is_lost else []
        data = os.read(self.stdout, 1 << 16)
        if not data:
            return None
        self._heard, self._silent = time_now, 0.0
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [event for event in map(json.loads, lines) if event["event"] != "alive"]

    def _stay_in_touch(self, addresses: Sequence[str]) -> None:
        """Say that we are here. While the agent is silent, ask whether its host is still there: that tells at once a
        host without power or network from a program that has to wait for memory or cores."""
        address = answering(addresses)
        while not self._closed.wait(ALIVE_SECONDS):
            self._say_alive()
            if address is not None:
                self._is_cut_off = self._silent > DOUBT_SECONDS and answering([address]) is None

    def _say_alive(self) -> None:
        with self._writing, suppress(BrokenPipeError):
            # Not into a pipe that is full: this would have to wait, and `send` with it.
            if not self._closed.is_set() and select.select([], [self._stdin], [], 0)[1]:
                os.write(self._stdin, b'{"op": "alive"}\n')

    def _await(self, expected: Sequence[str], seconds: float, late: str) -> dict[str, Any]:
        deadline = now() + seconds
        while now() < deadline and not self._cancelled():
            select.select([self.stdout], [], [], 0.1)
            if (events := self.poll()) is None:
                raise self.fault("it does not answer any more" if self._is_lost else "its connection ended")
            for event in events:
                if event["event"] == "failed":
                    raise EnvironmentFaultError(f"Node {self.name}: {event['sentence']}")
                if event["event"] in expected:
                    return dict(event)
        if self._cancelled():
            raise InterruptedWaitError(f"interrupted while node {self.name} was getting ready.")
        raise self.fault(f"it {late}")

    def fault(self, what: str) -> EnvironmentFaultError:
        """With the last thing that ssh, srun or the agent said."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = next((shown(line.strip()) for line in reversed(lines) if line.strip()), "")[:_SAID_CHARACTERS]
        return EnvironmentFaultError(
            f"Node {self.name} cannot run trials: {what}{f' ({said})' if said else ''}; mend that, or leave the node "
            "out, and start the same command again (earlier measurements are kept)."
        )

    def let_go(self) -> None:
        """Let the agent end, without waiting for it: it ends when its stdin does."""
        self._closed.set()
        with self._writing:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()

    def close(self) -> None:
        """End the agent and what started it."""
        self.let_go()
        try:
            self._process.wait(timeout=0 if self._is_lost else _END_SECONDS)
        except subprocess.TimeoutExpired:
            self._node.end(self._step)
            self._process.kill()
            self._process.wait()
        self._errors.close()


def close_all(agents: Sequence[Connection]) -> None:
    """End all `agents` at once."""
    for agent in agents:
        agent.let_go()
    for agent in agents:
        agent.close()
