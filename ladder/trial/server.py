"""The trial server: imports torch, deepspeed and transformers without initialising CUDA, and forks the ranks.

It reads requests from stdin and writes events to stdout, one JSON object per line. The first line says what to import:

    {"model_config": {…}, "task": "causal-lm", "operators": […]}

It may also have `preload`, the names of more modules, and `preload_if_there`, of modules that may be missing. Then come
requests:

    {"op": "load", "operators": […]}                            →  {"event": "loaded"}
    {"op": "start", "trial": "0001", "spec": "/…/spec.json"}   →  {"event": "started", "port": …, "pids": {rank: pid}}
    {"op": "kill"}                                              →  every rank and every descendant gets SIGKILL
                                                                →  {"event": "exit", "rank": 0, "status": -9}
                                                                →  {"event": "empty"}: no process is left
                                                                →  {"event": "stays"}: its ranks wait for another trial

With `"again": true`, a start gives the trial to the ranks that stayed. They are killed by "kill" or with the server.

The end of stdin means that the controller has ended: the server kills what it started and ends. It is a child
subreaper, so processes that a rank leaves behind become its children. Ranks ask the kernel to kill them when the server
ends (PR_SET_PDEATHSIG). multiprocessing's forkserver is unsuitable: it hides the exit status of orphans, ignores a
failed preload, and imports the caller's main module again in each rank.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ladder.events.as_json import from_json
from ladder.trial.descendants import end_descendants, has_children, kill_descendants
from ladder.trial.preload import UnknownModelError, load_operators, preload
from ladder.trial.protection import kernel
from ladder.trial.protection.level import Protection, View

_END_SECONDS = 3.0
"""How long killed ranks may take to end. Chosen: less than the 5 s that the controller waits for the server."""


class Server:
    """Runs one trial at a time, and keeps the pids of its ranks until they are reaped."""

    def __init__(self, requests: int, events: int) -> None:
        self._requests, self._events = requests, events
        self._ranks: dict[int, int] = {}
        self._lines: dict[int, socket.socket] = {}
        """By rank, where it says that it stays after its trial, and is told the next one."""
        self._ready: set[int] = set()
        """The ranks that said so."""
        self._started: frozenset[int] = frozenset()
        """All ranks of the trial; none once they are being killed."""
        self._waiting = False
        """They stay, and have no trial."""
        self._protection = Protection()
        self._view: View | None = None
        """What the ranks of the trial may write to, if they run a user's script."""
        self._buffer = b""
        self._busy = False
        self._pid = os.getpid()
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_write = wake_write
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Handle requests until stdin ends. On return or error, no process that it started is left."""
        try:
            self._send(event="ready", threads=len(os.listdir("/proc/self/task")))
            while True:
                heard: list[Any] = [self._requests, self._wake, *self._lines.values()]
                readable, _, _ = select.select(heard, [], [])
                self._hear(readable)
                if self._wake in readable:
                    with suppress(BlockingIOError):
                        while os.read(self._wake, 4096):
                            pass
                    self._reap()
                if self._requests in readable and not self._read_requests():
                    break
        finally:
            end_descendants(_END_SECONDS)
            self._close_view()

    def _read_requests(self) -> bool:
        data = os.read(self._requests, 65536)
        if not data:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "start":
                self._start(request)
            elif request["op"] == "kill":
                self._kill()
            elif request["op"] == "load":
                _or_unable(self._events, partial(load_operators, request["operators"]))
                self._send(event="loaded")
        return True

    def _kill(self) -> None:
        """Those that stay end too, and that is told like the end of a trial, also if they ended before."""
        waited, self._waiting, self._started = self._waiting, False, frozenset()
        self._busy = self._busy or waited
        kill_descendants()
        if waited:
            self._reap()

    def _start(self, request: dict[str, Any]) -> None:
        from ladder.events.protocol import TrialSpec
        from ladder.trial.store import meeting_point

        spec = from_json(TrialSpec, Path(request["spec"]).read_bytes())
        self._busy, self._waiting, self._started = True, False, frozenset(spec.local_ranks)
        self._ready.clear()
        if request["again"]:
            self._start_again(spec, request["spec"])
            return
        if spec.script is not None:
            spec = self._with_view(spec)
        address, port = (spec.share.address, spec.share.port) if spec.share is not None else ("127.0.0.1", 0)
        listener, port = meeting_point(address, port, spec.world_size)
        with listener:
            for rank in spec.local_ranks:
                ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._lines[rank] = ours
                pid = os.fork()
                if pid == 0:
                    self._become_rank(spec, rank, listener, port, its)
                its.close()
                self._ranks[pid] = rank
        self._send_started(port)

    def _with_view(self, spec: Any) -> Any:
        """Make a new view for a trial of a script, in which it sees nothing that an earlier trial wrote.

        Paths of the specification become absolute: the script may have another working folder.
        """
        folder, scratch = os.path.abspath(spec.folder), os.path.abspath(spec.script.scratch)
        zero = spec.deepspeed.get("zero_optimization", {})
        offloads = [zero.get(name, {}) for name in ("offload_optimizer", "offload_param")]
        real = {scratch, *(each["nvme_path"] for each in offloads if "nvme_path" in each)}
        for each in real:
            os.makedirs(each, exist_ok=True)
        self._view = self._protection.view(folder, sorted(real))
        script = replace(spec.script, scratch=scratch)
        return replace(spec, folder=folder, script=script)

    def _close_view(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.close()

    def _start_again(self, spec: Any, path: str) -> None:
        """Give the trial to the ranks that stayed. If one has ended since, the others end, as after any other death."""
        if set(self._ranks.values()) == self._lines.keys() == self._started:
            for line in self._lines.values():
                with suppress(BrokenPipeError):
                    line.send(os.fsencode(path))
        else:
            kill_descendants()
        self._send_started(0)
        self._reap()

    def _send_started(self, port: int) -> None:
        self._send(event="started", port=port, pids={rank: pid for pid, rank in self._ranks.items()})

    def _hear(self, readable: Sequence[Any]) -> None:
        """Note which ranks stay, and which lines have ended with their rank."""
        for rank, line in list(self._lines.items()):
            if line not in readable:
                continue
            try:
                is_ready = bool(line.recv(64))
            except ConnectionResetError:  # it was killed before it read what it was told
                is_ready = False
            if is_ready:
                self._ready.add(rank)
            else:
                self._lines.pop(rank).close()
        if self._busy and self._started and self._ready == self._started:
            self._busy, self._waiting = False, True
            self._send(event="stays")

    def _become_rank(self, spec: Any, rank: int, listener: socket.socket, port: int, line: socket.socket) -> NoReturn:
        status = 1
        try:
            kernel.die_with_parent(signal.SIGKILL)
            if os.getppid() != self._pid:  # the server ended between the fork and the line above
                os._exit(1)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with suppress(OSError):  # a container may forbid it; the kernel then chooses by size
                # If the host runs out of memory, the kernel should kill this rank and not somebody else's process.
                Path("/proc/self/oom_score_adj").write_text("1000")
            for fd in (self._requests, self._events, self._wake, self._wake_write):
                os.close(fd)
            for other in self._lines.values():
                other.close()
            from ladder.trial.staying import Line, log_to

            log_to(spec.folder, rank)
            if self._view is not None:
                self._protection.enter(self._view)
            # The rendezvous takes the descriptor over; the other ranks must not keep it open.
            listen_fd = listener.detach() if rank == 0 else None
            if rank != 0:
                listener.close()
            from ladder.trial.rank import run_rank

            status = run_rank(spec, rank, port, listen_fd, Line(line))
        finally:
            with suppress(OSError):  # the log's disk may be full
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)  # no destructors: they take seconds, and the kernel frees everything

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._ranks:
                self._send(event="exit", rank=self._ranks.pop(pid), status=os.waitstatus_to_exitcode(status))
        if self._busy and not self._ranks:
            kill_descendants()
            if not has_children():
                self._busy = False
                self._close_view()
                self._send(event="empty")

    def _send(self, **event: Any) -> None:
        try:
            os.write(self._events, json.dumps(event).encode() + b"\n")
        except BrokenPipeError:
            return  # the controller has ended, and stdin ends next


def _is_hung_up(fd: int) -> bool:
    """Whether the other end of the pipe is closed, even if there is still data in the pipe."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _import(job: Mapping[str, Any]) -> None:
    preload(job["model_config"], job["task"], job.get("preload", ()), job.get("preload_if_there", ()))
    load_operators(job["operators"])


def _or_unable(events: int, prepare: Callable[[], None]) -> None:
    """Run `prepare`; tell the controller why it fails, if it does, and let the error end the server."""
    try:
        prepare()
    except Exception as error:
        of_model = isinstance(error, UnknownModelError)
        reason = str(error) if of_model else f"{type(error).__name__}: {error}"
        os.write(events, json.dumps({"event": "unable", "of_model": of_model, "reason": reason}).encode() + b"\n")
        raise


def main() -> int:
    """Run the server: requests come on stdin, events go to stdout."""
    # While the server imports it does not read its stdin, so the kernel kills it when the controller ends.
    kernel.die_with_parent(signal.SIGKILL)
    kernel.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the controller handles Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was inherited as ignored, children could not be waited for
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # it may be inherited as blocked
    requests, events = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # a library's prints must not mix with the events
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    lines = os.fdopen(requests, "rb", closefd=False)  # reads ahead, but requests come only once we are ready
    line = lines.readline()
    if _is_hung_up(requests):  # the controller ended before PR_SET_PDEATHSIG took effect
        return 1
    job = json.loads(line)
    _or_unable(events, partial(_import, job))
    kernel.die_with_parent(0)  # from here on the end of stdin ends the server, after its ranks
    Server(requests, events).serve()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to clean up, and the libraries' destructors take seconds


if __name__ == "__main__":
    sys.exit(main())
