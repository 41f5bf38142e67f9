"""One job, as the tune sees it: its keeper is asked, told to end, and heard."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.errors import EnvironmentFaultError, UsageError
from ladder.launch.jobs import files
from ladder.launch.jobs.states import NEVER, is_over, why_it_ended
from ladder.launch.modules import module_command, module_environment
from ladder.launch.nodes.connection import Node
from ladder.launch.watch import now
from ladder.machine.lease import InterruptedWaitError
from ladder.runs.history import make_private
from ladder.text import shown

_TICK_SECONDS = 0.1
"""Between two looks at whether the user interrupts. Chosen."""
_TELL_SECONDS = 5.0
"""A job that waits for less is not worth a sentence. Chosen."""
_REPEAT_SECONDS = 600.0
"""Between two sentences about a job that waits for the same reason. Chosen."""
_AGAIN_SECONDS = 1.0
"""Between two questions about a job that is ending. Chosen."""
_ANSWER_SECONDS = 60.0
"""For Slurm to say how a job ended. Chosen: it gives processes 30 s to end (KillWait) before the job is over."""
_END_SECONDS = 20.0
"""How long a keeper may take to end. Chosen: it gives its job up to 10 s."""
_REASON_CHARACTERS = 300
"""Of what sbatch or a job says, in an error. Chosen: about three lines of a terminal."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What every job asks of Slurm."""

    nodes: int
    time: str
    """In Slurm's words."""
    account: str | None = None
    partition: str | None = None
    mem: str | None = None
    """Of a node."""
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    more: tuple[tuple[str, str | None], ...] = ()
    """Further options of sbatch by name; None for those without a value."""

    def parameters(self, name: str, folder: Path) -> dict[str, Any]:
        """For submitit."""
        # Without a value of its own, srun gives a task one core, whatever the job has.
        share = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        more = {option: True if value is None else value for option, value in self.more}
        return {
            "job_name": name,
            "nodes": self.nodes,
            "ntasks_per_node": 1,
            "account": self.account,
            "partition": self.partition,
            "mem": self.mem,
            "cpus_per_task": self.cpus_per_task,
            "gpus_per_node": self.gpus_per_node,
            "wckey": None,
            "srun_args": ["--kill-on-bad-exit=1", *share],
            # A job that Slurm would queue again could not go on: its trial is over. In the folder of the job no file
            # of the user's can take the place of a module.
            "additional_parameters": {"time": self.time, "no-requeue": True, "chdir": str(folder), **more},
        }


def require_submission() -> None:
    """UsageError where no job can be submitted."""
    if importlib.util.find_spec("submitit") is None:
        raise UsageError("--launcher slurm-jobs needs submitit; install it with: pip install 'oom-ladder[slurm-jobs]'")
    if shutil.which("sbatch") is None:
        raise UsageError("--launcher slurm-jobs calls sbatch, which is not here; start it on a node that has Slurm.")


class Job:
    """A job that is submitted by its creation, in a new folder that all nodes will see."""

    def __init__(self, asked: Asked, folder: Path, note: Callable[[str], None], cancelled: Callable[[], bool]) -> None:
        self.folder, self._note, self._cancelled = folder.absolute(), note, cancelled
        self._unheard = range(asked.nodes)
        make_private(self.folder.parent)
        files.create(self.folder, asked.nodes)
        with (self.folder / "keeper.log").open("ab") as log:
            self._keeper = subprocess.Popen(
                module_command("ladder.launch.jobs.keeper"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_outside(module_environment({})),
                start_new_session=True,  # only the tune handles Ctrl-C
            )
        self._buffer, self._asked, self._answered = b"", 0, 0
        self.number = ""
        self.state, self.reason, self.names = "", "", ""
        self.ends_at: float | None = None
        """On the clock of `now`; None if the job has no time limit, or does not run."""
        parameters = asked.parameters(f"ladder-{self.folder.name}", self.folder)
        self._send({"folder": str(self.folder), "place": os.getcwd(), "parameters": parameters})

    @property
    def runs(self) -> bool:
        """Whether it ran when last asked."""
        return self.state == "RUNNING"

    def wait_until_it_runs(self) -> float:
        """Wait in the queue, and return for how many seconds; the user is told of a job that stays there.

        EnvironmentFaultError if Slurm does not take the job, will never start it, or ends it before it runs.
        """
        began = now()
        told, told_at = "", began
        while not self.runs:
            self._hear()
            if self._cancelled():
                raise InterruptedWaitError(f"interrupted while Slurm job {self.number or '…'} waited in the queue.")
            if is_over(self.state):
                raise self.fault()
            if self.state == "PENDING" and self.reason in NEVER:
                raise EnvironmentFaultError(
                    f"Slurm will not start job {self.number} ({self.reason}); ask for what the partition has with "
                    "--nodes, --gpus, --time, --partition, --account or --job-option, and start again."
                )
            why = self.reason if self.state == "PENDING" else self.state
            is_late = now() - began > _TELL_SECONDS
            if why and is_late and not self.runs and (why != told or now() - told_at > _REPEAT_SECONDS):
                told, told_at = why, now()
                self._note(f"Slurm job {self.number} waits in the queue ({why}); no time is counted until it runs.")
        return now() - began

    def nodes(self, names: Sequence[str]) -> list[Node]:
        """Its nodes, called `names`, which run their agents already."""

        self._unheard = range(0)

        def node(index: int, name: str) -> Node:
            # Whatever is asked to run there, it is the agent that `task.serve` runs.
            pipe = module_command("ladder.launch.jobs.pipe", str(self.folder), str(index))
            return Node(name=name, command=lambda program: pipe)

        return [node(index, name) for index, name in enumerate(names)]

    def asked_now(self) -> str:
        """Its state, from Slurm itself."""
        self._asked += 1
        self._send({})
        deadline = now() + _ANSWER_SECONDS
        while self._answered < self._asked and now() < deadline and not self._cancelled() and self._hear():
            pass
        return self.state

    def has_ended(self) -> bool:
        """Whether nothing can run in it any more, or Slurm did not take it."""
        try:
            return is_over(self.asked_now())
        except EnvironmentFaultError:
            return True

    def how_it_ended(self) -> str:
        """The state in which Slurm ended it; empty if it still runs."""
        deadline = now() + _ANSWER_SECONDS
        while not is_over(self.asked_now()) and not self.runs and now() < deadline and not self._cancelled():
            time.sleep(_AGAIN_SECONDS)
        return self.state if is_over(self.state) else ""

    def close(self) -> None:
        """Cancel it, unless it has ended; its folder stays if it ended badly."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        for node in self._unheard:  # no pipe will tell them
            files.append(files.requests(self.folder, node), files.END)
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        if not is_over(self.state) or self.state == "COMPLETED":
            shutil.rmtree(self.folder, ignore_errors=True)

    def said(self) -> str:
        """The last line that its first node wrote on stderr."""
        lines = [line.strip() for file in self.folder.glob("*_0_log.err") for line in _lines(file)]
        return shown(next((line for line in reversed(lines) if line), ""))[:_REASON_CHARACTERS]

    def fault(self) -> EnvironmentFaultError:
        """For a job that ended before its agents were ready."""
        said = f" ({said})" if (said := self.said()) else ""
        return EnvironmentFaultError(
            f"Slurm job {self.number} ended before it ran a trial: {why_it_ended(self.state)}{said}; mend that, and "
            "start the same command again (earlier measurements are kept)."
        )

    def _send(self, content: dict[str, Any]) -> None:
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):  # `_hear` will say so
            self._keeper.stdin.write(json.dumps(content).encode() + b"\n")
            self._keeper.stdin.flush()

    def _hear(self) -> bool:
        """What the keeper has said within a moment. EnvironmentFaultError if it has ended."""
        assert self._keeper.stdout is not None
        if not select.select([self._keeper.stdout], [], [], _TICK_SECONDS)[0]:
            return True
        data = os.read(self._keeper.stdout.fileno(), 1 << 16)
        if not data:
            raise EnvironmentFaultError(
                f"The program that watches Slurm job {self.number} has ended; see {self.folder / 'keeper.log'}, and "
                "start the same command again."
            )
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for event in map(json.loads, lines):
            self._take(event)
        return True

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "failed":
            said = shown(" ".join(event["sentence"].split()))[:_REASON_CHARACTERS]
            raise EnvironmentFaultError(f"Slurm does not take the job: {said}; correct that and start again.")
        if event["event"] == "submitted":
            self.number = event["job"]
            return
        self.state, self.reason, self.names = event["state"], event["reason"], event["nodes"]
        self._answered += event["asked"]
        if self.runs and event["ends_at"] is not None:
            self.ends_at = event["ends_at"]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _outside(environment: dict[str, str]) -> dict[str, str]:
    """Without a job around this process, whose variables would decide about the new one."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
