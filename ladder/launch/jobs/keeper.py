"""Owns one job: submits it through submitit, says how it stands, and cancels it when stdin ends.

It is a program of its own, so that a job is cancelled also when the tune is killed. It reads one JSON object, and then
a line for each time that it shall ask Slurm at once. It prints one JSON object a line:

    {"event": "failed", "sentence": "…"}      Slurm does not take the job
    {"event": "submitted", "job": "12"}
    {"event": "state", "state": "PENDING", "reason": "Resources", "nodes": "", "ends_at": null, "asked": 1}

`state` comes when it changes, and as an answer; `ends_at` is when the job's time is up, on CLOCK_MONOTONIC, which the
tune shares: it may read the line much later.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor, SlurmJob
from submitit.slurm.slurm import SlurmInfoWatcher

from ladder.launch.jobs.files import ALIVE_SECONDS, END, append, events, say_alive
from ladder.launch.jobs.states import GONE, is_over
from ladder.launch.jobs.task import serve
from ladder.launch.watch import now
from ladder.machine.interpreter import is_own, ranks_python

_TICK_SECONDS = 0.2
"""Between two looks at the folder. Chosen."""
_POLL_SECONDS = 10
"""At most this long between two questions to Slurm while a job waits. Chosen: its controller serves a whole cluster."""
_SQUEUE_SECONDS = 30
"""For squeue to answer; then it is asked again. Chosen: a busy controller takes some seconds."""
_BEFORE_IT_RUNS = ("", "PENDING", "CONFIGURING")
_RUNS_SECONDS = 60.0
"""Between two questions while a job runs: its pipes tell its end sooner. Chosen."""
_END_SECONDS = 10.0
"""For a job to end by itself once its agents were told to. Chosen: they take up to 8 s."""


class Queue(SlurmInfoWatcher):  # type: ignore[misc]  # submitit is optional, so its types are not known
    """Asks squeue: submitit itself asks sacct, which needs an accounting database, and answers late."""

    def __init__(self, name: str) -> None:
        super().__init__(delay_s=_POLL_SECONDS)
        self._name = name

    def _make_command(self) -> list[str]:
        mine = [f"--user={os.getuid()}", f"--name={self._name}"]  # a job that Slurm has forgotten is no error then
        # submitit would wait for ever, and the keeper could not notice meanwhile that the tune has ended.
        limited = ["timeout", "-k", "5", str(_SQUEUE_SECONDS)]
        return [*limited, "squeue", "--states=all", *mine, "--format=%i|%T|%N|%r|%L"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        text = string.decode() if isinstance(string, bytes) else string
        lines = ["JobID|State|NodeList|Reason|TimeLeft", *text.splitlines()[1:]]
        forgotten = {"State": GONE}
        return {**dict.fromkeys(self._registered, forgotten), **super().read_info("\n".join(lines))}


class _Job(SlurmJob[None]):  # type: ignore[misc]
    watcher: SlurmInfoWatcher


class _Executor(SlurmExecutor):  # type: ignore[misc]
    job_class = _Job


class Keeper:
    """One job, from its submission to its end."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._folder, self._nodes = Path(asked["folder"]), int(asked["parameters"]["nodes"])
        _Job.watcher = Queue(asked["parameters"]["job_name"])
        executor = _Executor(self._folder, max_num_timeout=0)
        executor.update_parameters(**asked["parameters"])
        self._job = executor.submit(serve, str(self._folder), asked["place"], *([] if is_own() else [ranks_python()]))
        _say("submitted", job=self._job.job_id)
        self._info: dict[str, str] = {}
        self._ends_at: float | None = None
        self._told: dict[str, Any] = {}
        self._state, self._asked = "", 0
        self._looked = now()
        # A thread of its own: a slow Slurm is no reason for a job to think that the tune is gone.
        threading.Thread(target=_live, args=(self._folder,), daemon=True).start()

    def follow(self) -> None:
        """Until stdin ends."""
        self._look("force")
        while True:
            if select.select([0], [], [], _TICK_SECONDS)[0]:
                data = os.read(0, 1 << 12)
                if not data:
                    return
                self._asked += data.count(b"\n")
                self._look("force")
            if is_over(self._state):
                continue
            has_begun = events(self._folder, 0).stat().st_size > 0
            self._look(way_to_look(self._state, has_begun, now() - self._looked))

    def end(self) -> None:
        """Let a job that runs end by itself, as its agents were told, and cancel it if it does not, or waits."""
        deadline = time.monotonic() + _END_SECONDS * (self._state == "RUNNING")
        while time.monotonic() < deadline and not self._has_ended():
            time.sleep(_TICK_SECONDS)
        if not self._has_ended() and not is_over(self._state):
            self._job.cancel(check=False)

    def _has_ended(self) -> bool:
        """submitit writes what each task returns, when it has ended."""
        return all(self._job.task(node).paths.result_pickle.exists() for node in range(self._nodes))

    def _look(self, mode: str) -> None:
        """Ask submitit for the state, and tell it if it is news."""
        number, watcher, looked = self._job.job_id, _Job.watcher, now()
        watcher.get_state(number, mode)
        info = watcher.get_info(number, "cache")
        if mode == "force":
            self._looked = looked
        if info is not self._info:  # squeue has answered
            left = seconds_of(info.get("TimeLeft", ""))
            self._info, self._ends_at = info, None if left is None else looked + left
        state = info.get("State", "")
        if not state or (state == GONE and not self._state):  # it cannot be forgotten before it was known
            return
        told = {"state": state, "reason": info.get("Reason", ""), "nodes": info.get("NodeList", "")}
        if told != self._told or self._asked:
            self._told, self._state = told, state
            _say("state", **told, ends_at=self._ends_at, asked=self._asked)
            self._asked = 0
            if is_over(state):
                for node in range(self._nodes):
                    append(events(self._folder, node), END)  # its agents cannot any more


def way_to_look(state: str, has_begun: bool, since: float) -> str:
    """submitit's word for how soon to ask about a job in `state`, `since` seconds after it was asked at once.

    `has_begun` says that an agent of the job has written something.
    """
    if has_begun and state in _BEFORE_IT_RUNS:
        return "force"  # our knowledge is old
    if has_begun and state == "RUNNING":
        return "force" if since > _RUNS_SECONDS else "cache"
    return "standard"


def _live(folder: Path) -> None:
    """Give a sign of life for as long as this process lives."""
    while True:
        with suppress(OSError):
            say_alive(folder)
        time.sleep(ALIVE_SECONDS)


def seconds_of(text: str) -> int | None:
    """Of Slurm's `1-02:03:04`; None for words such as UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _say(event: str, **content: Any) -> None:
    with suppress(BrokenPipeError):  # stdin has ended too
        os.write(1, json.dumps({"event": event, **content}).encode() + b"\n")


def main() -> int:
    """See the module."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        keeper = Keeper(json.loads(_line()))
    except Exception as error:  # submitit has errors of its own, and passes on sbatch's
        _say("failed", sentence=str(error))
        return 1
    try:
        keeper.follow()
    finally:
        keeper.end()
    return 0


def _line() -> bytes:
    """The first line of stdin, and nothing behind it: `follow` waits for more."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
