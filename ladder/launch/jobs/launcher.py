"""Trials in jobs: one job for several trials, or one for each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ladder.errors import EnvironmentFaultError
from ladder.events.protocol import DoneEvent, Event, FailedEvent, TrialSpec
from ladder.events.trial_run import Ending, TrialRun
from ladder.launch.base import Deadlines, Listener
from ladder.launch.jobs.job import Asked, Job, require_submission
from ladder.launch.jobs.states import why_it_ended
from ladder.launch.nodes.cluster import Cluster, Wanted
from ladder.launch.nodes.connection import Connection
from ladder.launch.nodes.launcher import NodesLauncher
from ladder.launch.nodes.slurm import hostnames
from ladder.launch.watch import now
from ladder.machine.described import Machine

_LEAST_LEFT = 60.0
"""Seconds that a job needs for another trial, or twice the longest trial so far. Chosen."""


class Jobs:
    """The jobs of one tune: at most `queued` in the queue at once, each with at most `trials` trials."""

    def __init__(
        self,
        asked: Asked,
        wanted: Wanted,
        folder: Path,
        *,
        trials: int | None = None,
        queued: int = 1,
        note: Callable[[str], None] = lambda sentence: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        require_submission()
        self._asked, self._wanted, self._folder = asked, wanted, folder
        self._trials, self._queued = trials, queued
        self.note, self._cancelled = note, cancelled
        self._job: Job | None = None
        self._next: Job | None = None
        self._cluster: Cluster | None = None
        self._machine: Machine | None = None
        self._num_trials, self._longest = 0, 0.0
        self.names: list[str] = []
        """Of the nodes that the job got."""
        self.waited = 0.0
        """Seconds in the queue, of all jobs."""

    def machine(self) -> Machine:
        """What a job gets, once one runs; later jobs have to get the like of it.

        EnvironmentFaultError if Slurm takes no job, or one of its nodes is no good.
        """
        cluster = self._begun()
        try:
            machine = cluster.machine()
        except EnvironmentFaultError:
            if self._job is not None and self._job.how_it_ended():
                raise self._job.fault() from None
            raise
        if self._machine is not None and _kind_of(machine) != _kind_of(self._machine):
            raise EnvironmentFaultError(
                f"Slurm job {self.number} has {_in_words(machine)} and the tune began on {_in_words(self._machine)}; "
                "ask for one kind, such as with --job-option constraint=NAME, and start the same command again."
            )
        self._machine = self._machine or machine
        return machine

    def opened(
        self, folder: Path, marker: str, job: Mapping[str, Any], environment: Mapping[str, str], *, cold: bool
    ) -> tuple[Sequence[Connection], str]:
        """The agents of a job, ready for trials; as `Cluster.opened`."""
        if self._cluster is None:
            self.machine()
        assert self._cluster is not None
        return self._cluster.opened(folder, marker, job, environment, cold=cold)

    def first(
        self, folder: Path, marker: str, job: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[Sequence[Connection], str]:
        """The agent of the first node alone; as `Cluster.first`."""
        assert self._cluster is not None
        return self._cluster.first(folder, marker, job, environment)

    @property
    def number(self) -> str:
        """Of the job that runs, or waits."""
        return self._job.number if self._job is not None else ""

    def trial_begins(self) -> None:
        """Count a trial. If it is the job's last one, the next job may wait in the queue meanwhile."""
        self._num_trials += 1
        if self._queued > 1 and self._next is None and self._is_last():
            self._next = self._submitted()

    def trial_ended(self, seconds: float) -> None:
        """It took so long."""
        self._longest = max(self._longest, seconds)

    @property
    def is_spent(self) -> bool:
        """Whether the job cannot run another trial."""
        return self._job is None or self._is_last()

    def how_it_ended(self) -> str:
        """The state in which Slurm ended the job; empty if it runs."""
        return self._job.how_it_ended() if self._job is not None else ""

    def end(self) -> None:
        """End the job whose agents have been let go."""
        if self._cluster is not None:
            self._cluster.close()
        if self._job is not None:
            self._job.close()
        self._job = self._cluster = None
        self._num_trials = 0

    def close(self) -> None:
        """End all of them."""
        self.end()
        if self._next is not None:
            self._next.close()
            self._next = None

    def _begun(self) -> Cluster:
        """The nodes of a job that runs."""
        if self._job is None:
            self._job = self._next_job()
        try:
            self.waited += self._job.wait_until_it_runs()
            self.names = hostnames(self._job.names)
            self._cluster = Cluster(self._job.nodes(self.names), self._wanted, self._cancelled)
        except BaseException:
            self.end()
            raise
        return self._cluster

    def _next_job(self) -> Job:
        """The one that waits in the queue already, or a new one."""
        job = self._next
        if job is not None and job.has_ended():
            # Its time was up before its turn came, somebody cancelled it, or Slurm takes one job at a time.
            self.note(f"Slurm job {job.number or '…'} ended before its turn came; another one is submitted.")
            job.close()
            job = None
        self._next = None
        return job or self._submitted()

    def _submitted(self) -> Job:
        return Job(self._asked, self._folder / secrets.token_hex(4), self.note, self._cancelled)

    def _is_last(self) -> bool:
        """Whether no other trial can follow in this job."""
        if self._trials is not None and self._num_trials >= self._trials:
            return True
        ends_at = self._job.ends_at if self._job is not None else None
        return ends_at is not None and ends_at - now() < max(_LEAST_LEFT, 2 * self._longest)


class JobsLauncher(NodesLauncher):
    """Runs trials on the nodes of `jobs`. The time of a trial begins when its job runs."""

    def __init__(
        self,
        jobs: Jobs,
        opened: Callable[[], tuple[Sequence[Connection], str]],
        *,
        ranks: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(opened, ranks=ranks, cancelled=cancelled)
        self._jobs = jobs

    def now(self) -> float:
        """Seconds, but for those that jobs waited in the queue."""
        return now() - self._jobs.waited

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        run = super().run(spec, deadlines, listener)
        self._jobs.trial_ended(run.ended - run.requested)
        is_complete = all(events and isinstance(events[-1], DoneEvent) for events in run.events)
        was_interrupted = run.stop is not None and run.stop.kind == "cancelled"
        if not is_complete and not was_interrupted and (state := self._jobs.how_it_ended()):
            ended_by_slurm(run, state, self._jobs.number)
            self._jobs.note(f"{run.stop.sentence}; what comes next gets another job." if run.stop else "")
            self.close()
        if not self._agents or self._jobs.is_spent:
            self.close()
        return run

    def close(self) -> None:
        super().close()
        self._jobs.end()

    def _begin(self, spec: TrialSpec) -> TrialSpec:
        self._jobs.trial_begins()
        return spec if spec.stop_at is None else replace(spec, stop_at=spec.stop_at + self._jobs.waited)


def ended_by_slurm(run: TrialRun, state: str, number: str) -> None:
    """Say so in `run`. How its ranks ended, and what they said of each other's end, follows from that."""
    kind: Literal["host_oom", "lost_server"] = "host_oom" if state == "OUT_OF_MEMORY" else "lost_server"
    run.stop = Ending(kind=kind, sentence=f"Slurm ended job {number} during the trial: {why_it_ended(state)}")
    run.killed = run.killed.union(run.exits)
    run.events = [[_as_a_consequence(event) for event in events] for events in run.events]


def _as_a_consequence(event: Event) -> Event:
    if isinstance(event, FailedEvent) and event.outcome == "crash":
        return replace(event, consequence=True)
    return event


def _kind_of(machine: Machine) -> tuple[object, ...]:
    return machine.device, machine.num_nodes, machine.world_size, [gpu.name for gpu in machine.gpus]


def _in_words(machine: Machine) -> str:
    what = machine.gpus[0].name if machine.gpus else "CPU ranks"
    return f"{machine.num_nodes} nodes with {machine.world_size // machine.num_nodes} × {what} each"
