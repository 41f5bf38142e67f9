"""Trials on this host: ranks forked by a trial server, watched through their files."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ladder.errors import EnvironmentFaultError, LadderError
from ladder.events.as_json import to_json
from ladder.events.protocol import UNREPORTED, MeasuredEvent, TrialSpec
from ladder.events.trial_run import Ending, TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.launch.nvml import Gpus, Sampler
from ladder.launch.staying import is_doubtful, set_aside
from ladder.launch.trial_server import TrialServer
from ladder.launch.watch import OomKills, Watch, now

PRELOAD_IF_THERE = "preload_if_there"
"""The key of modules in a job that a server may leave out."""
_TICK_SECONDS = 0.02
"""Between two checks of the ranks. Chosen: short compared with an optimizer step, and hardly any work."""
_RELEASE_SECONDS = 30.0
"""How long the driver may take to free the memory of ranks that ended. Chosen: it usually takes a few seconds, so after
30 s something else is using the memory."""
_KILL_SECONDS = 20.0
"""How long ranks may take to end after SIGKILL. Chosen: the slowest part, freeing 17 GB of pinned memory, took 4.7 s
(measured: benchmarks/results/1xh200-pinning)."""


class LocalLauncher(Launcher):
    """Runs trials one after another. With `cold`, every trial starts a new server, which repeats all imports.

    It runs only the ranks of a trial's `share`, if it has one, and calls `on_port` with the port where they meet.
    """

    def __init__(
        self,
        *,
        marker: str,
        job: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        gpu_uuids: tuple[str, ...] = (),
        cancelled: Callable[[], bool] = lambda: False,
        cold: bool = False,
        on_port: Callable[[int], None] = lambda port: None,
        kill_seconds: float = _KILL_SECONDS,
    ) -> None:
        self._job = {"operators": [], **job}
        self._make_server = partial(TrialServer, marker=marker, job=self._job, environment=environment, log=log)
        self._loaded: set[str] = set()
        """The operators that the server has loaded, or loads as it starts."""
        self._server: TrialServer | None = None if cold else self._started()
        self._ready = False
        self._staying: TrialSpec | None = None
        """The trial whose ranks wait for another one."""
        self._cold, self._kill_seconds = cold, kill_seconds
        self._cancelled, self._on_port = cancelled, on_port
        self._gpus = Gpus(gpu_uuids) if gpu_uuids else None

    def load(self, operators: Sequence[str]) -> None:
        """Name operators that trials need from now on, and that are built."""
        self._job["operators"] = list(dict.fromkeys((*self._job["operators"], *operators)))

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        """As `Launcher.run`, but for ranks that wait for another trial, if `spec` lets them.

        A trial that ended badly in ranks that ran another one before is repeated in new ones, unless the earlier one
        cannot be the cause.
        """
        if self._cold or spec.share is not None:  # several nodes would have to agree
            spec = replace(spec, may_stay=False)
        requested, again = now(), self._can_serve(spec)
        run = self._run(spec, deadlines, listener, again=again)
        if again and is_doubtful(run):
            set_aside(run)
            run = self._run(spec, deadlines, listener, again=False)
        run.requested = requested
        return run

    def _can_serve(self, spec: TrialSpec) -> bool:
        """Whether ranks wait that can run `spec`."""
        is_alike = self._staying is not None and spec.may_stay and spec.processes == self._staying.processes
        return is_alike and self._loaded.issuperset(self._job["operators"])

    def _run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener, *, again: bool) -> TrialRun:
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        spec_file = folder / ("spec.json" if spec.share is None else f"spec-from-rank{spec.share.first}.json")
        spec_file.write_text(to_json(spec, indent=1), encoding="utf-8")
        run = TrialRun(spec=spec, events=[[] for _ in range(spec.world_size)])
        if not again and (stuck := self._end_staying()) is not None:
            run.started = run.ended = now()
            run.stop = stuck
            return run
        server = self._ready_server()
        if server is None:
            run.started = run.ended = now()
            run.stop = self._cancellation()
            return run
        sampler = Sampler(self._gpus) if self._gpus else None
        if self._gpus and sampler:
            if not again:
                self._gpus.mark()
            sampler.start()
        oom_kills = OomKills(server.pid)
        serves, left = False, []
        try:
            serves = self._follow(run, server, spec_file, deadlines, listener, sampler, again=again)
        finally:
            if sampler:
                sampler.stop()
            self._staying = spec if run.stays else None
            if self._cold or not serves:
                left = self._drop_server()
            self._remove_swap(spec)
        run.oom_kills = oom_kills.since()
        held = None if run.stays else self._unreleased(spec)
        run.stop = _unkillable(left, spec) or held or _unreported(run) or run.stop
        run.ended = now()
        if sampler:
            run.device_use = {
                event.candidate: sampler.between(event.began, event.t)
                for event in run.events[spec.local_ranks[0]]
                if isinstance(event, MeasuredEvent)
            }
        return run

    def close(self) -> None:
        self._drop_server()

    def _ready_server(self) -> TrialServer | None:
        """The server once it can start trials; None if the tune is cancelled before that."""
        if self._server is None:
            self._server, self._ready = self._started(), False
        if not self._ready:
            try:
                self._ready = self._waited_for(self._server)
            except LadderError:
                self._server = None
                raise
        if self._ready and (new := [name for name in self._job["operators"] if name not in self._loaded]):
            self._ready = self._server.load(new, self._cancelled)
            self._loaded.update(new)
        if not self._ready:
            self._server = None
        return self._server

    def _waited_for(self, server: TrialServer) -> bool:
        """Whether `server` is ready, or else another one, which leaves out what need not be imported.

        A server may be killed from outside while it starts.
        """
        with suppress(EnvironmentFaultError):
            return server.wait_ready(self._cancelled)
        self._job.pop(PRELOAD_IF_THERE, None)
        self._server = self._started()
        return self._server.wait_ready(self._cancelled)

    def _started(self) -> TrialServer:
        self._loaded = set(self._job["operators"])
        return self._make_server()

    def _end_staying(self) -> Ending | None:
        """End the ranks that wait for another trial; what keeps the next one from starting, if something does."""
        spec, self._staying = self._staying, None
        if spec is None or self._server is None:
            return None
        self._server.kill_ranks()
        deadline = now() + self._kill_seconds
        while (events := self._server.poll(_TICK_SECONDS)) is not None and now() < deadline:
            if any(event["event"] == "empty" for event in events):
                return self._unreleased(spec)
        return _unkillable(self._drop_server(), spec) or self._unreleased(spec)

    def _drop_server(self) -> list[int]:
        """End the server, if there is one. Returns the pids of processes that could not be killed."""
        left = self._server.close() if self._server is not None else []
        self._server, self._ready, self._staying = None, False, None
        return left

    def _follow(
        self,
        run: TrialRun,
        server: TrialServer,
        spec_file: Path,
        deadlines: Deadlines,
        listener: Listener,
        sampler: Sampler | None,
        *,
        again: bool,
    ) -> bool:
        """Follow a trial from its start until none of its processes is left, or all stay.

        False if the server ended or is stuck.
        """
        server.start(run.spec.trial, spec_file, again=again)
        watch = Watch(run.spec, deadlines, listener, now())
        for rank, file in watch.files.items():
            run.events[rank] = file.events
        killed_at: float | None = None
        while True:
            events = server.poll(_TICK_SECONDS)
            if events is None:
                run.stop = run.stop or Ending(kind="lost_server", sentence="the trial server ended unexpectedly")
                watch.read()
                return False
            watch.read()
            for event in events:
                if event["event"] == "started":
                    self._on_port(event["port"])
            if killed_at is not None:  # that they stay was said before they were killed
                events = [event for event in events if event["event"] != "stays"]
            if _note(events, run, watch):
                return True
            watch.leave_out_pause()
            if killed_at is not None:
                if watch.time() - killed_at > self._kill_seconds:
                    return False
                continue
            if run.stop is None:
                lost = Ending(kind="environment", sentence=sampler.fault) if sampler and sampler.fault else None
                run.stop = self._cancellation() or lost or watch.overdue(server.is_stopped)
                if run.spec.share is not None and self._cancelled():
                    # Another node's rank may only have waited for one of ours.
                    run.stop = watch.stopped(server.is_stopped) or run.stop
            if run.stop is not None or watch.must_end():
                run.killed = frozenset(run.spec.local_ranks) - run.exits.keys()
                server.kill_ranks()
                killed_at = watch.time()

    def _cancellation(self) -> Ending | None:
        return Ending(kind="cancelled", sentence="the tune was interrupted") if self._cancelled() else None

    def _unreleased(self, spec: TrialSpec) -> Ending | None:
        try:
            if self._gpus is None or self._gpus.wait_released(_RELEASE_SECONDS):
                return None
        except EnvironmentFaultError as lost:
            return Ending(kind="environment", sentence=str(lost))
        return Ending(
            kind="environment",
            sentence=f"GPU memory is still in use {_RELEASE_SECONDS:.0f} s after trial {spec.trial} ended, by another "
            "process or by the driver; check nvidia-smi, free the GPU and start the same command again.",
        )

    def _remove_swap(self, spec: TrialSpec) -> None:
        """Delete the trial's NVMe files, in a thread because gigabytes take time."""
        offloads = [
            spec.deepspeed.get("zero_optimization", {}).get(name, {}) for name in ("offload_optimizer", "offload_param")
        ]
        for path in {offload["nvme_path"] for offload in offloads if "nvme_path" in offload}:
            threading.Thread(target=shutil.rmtree, args=(path,), kwargs={"ignore_errors": True}).start()


def _note(events: Sequence[Mapping[str, Any]], run: TrialRun, watch: Watch) -> bool:
    """Record the server's events in `run`; True once no process of the trial is left, or all stay."""
    for event in events:
        if event["event"] == "started":
            run.started = now()
        elif event["event"] == "exit":
            run.exits[event["rank"]] = event["status"]
            watch.note_exit(event["rank"])
        elif event["event"] in ("empty", "stays"):
            run.stays = event["event"] == "stays"
            return True
    return False


def _unkillable(left: Sequence[int], spec: TrialSpec) -> Ending | None:
    if not left:
        return None
    return Ending(
        kind="environment",
        sentence=f"Trial {spec.trial} left process {', '.join(map(str, left))}, which does not end even after SIGKILL "
        "(a driver or a file system blocks it); wait until it is gone or reboot, then start the same command again.",
    )


def _unreported(run: TrialRun) -> Ending | None:
    rank = next((rank for rank, status in run.exits.items() if status == UNREPORTED), None)
    if rank is None:
        return None
    return Ending(
        kind="environment",
        sentence=f"Rank {rank} could not write to {run.spec.folder}, probably because the disk is full; free some "
        "space and start the same command again (earlier measurements are kept).",
    )
