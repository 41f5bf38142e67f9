"""Trials on several nodes: each node's agent runs its share, and this launcher starts, joins and ends them together."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ladder.events.as_json import to_json
from ladder.events.protocol import DoneEvent, Event, Share, TrialSpec, parse_event
from ladder.events.trial_run import Ending, TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.launch.nodes.connection import Connection, close_all
from ladder.launch.nodes.merged import merged, moved
from ladder.launch.nodes.wire import from_wire
from ladder.launch.watch import now
from ladder.machine.lease import InterruptedWaitError

_TICK_SECONDS = 0.05
"""Between two checks of the agents. Chosen: they watch their ranks themselves, so it only delays the end of a trial."""
_GRACE_SECONDS = 0.5
"""After one node's part ends early, the others have this long to report their own cause. Chosen: a little more than the
0.3 s that ranks of one node have."""
_END_SECONDS = 60.0
"""How long a node may take to end its part once told to. Chosen: to kill ranks and free a GPU may take 20 and 30 s."""
_INTERRUPTED = Ending(kind="cancelled", sentence="the tune was interrupted")


class NodesLauncher(Launcher):
    """Runs trials on all nodes, with `ranks` on each.

    `opened` starts an agent on each node, ready for trials, and says at which address all reach the first one. It is
    called again for the trial after one that lost a node.
    """

    def __init__(
        self,
        opened: Callable[[], tuple[Sequence[Connection], str]],
        *,
        ranks: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._opened, self._ranks, self._cancelled = opened, ranks, cancelled
        self._agents: list[Connection] = []
        self._address = ""
        self._operators: list[str] = []

    def load(self, operators: Sequence[str]) -> None:
        """Name operators that trials need from now on."""
        self._operators = list(dict.fromkeys((*self._operators, *operators)))

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        folder = Path(spec.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_text(to_json(spec, indent=1), encoding="utf-8")
        if not self._agents:
            begun = now()
            try:
                agents, self._address = self._opened()
            except InterruptedWaitError:
                none: list[list[Event]] = [[] for _ in range(spec.world_size)]
                return TrialRun(spec=spec, events=none, stop=_INTERRUPTED, requested=begun, started=begun, ended=now())
            self._agents = list(agents)
        for agent in self._agents:
            agent.send("load", operators=self._operators)
        trial = _Trial(self._agents, spec, self._ranks, self._address, listener)
        try:
            trial.follow(deadlines, self._cancelled)
        finally:
            if not trial.is_over:
                self._let_go()
        return trial.joined()

    def close(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        close_all(self._agents)
        self._agents = []


class _Trial:
    """One trial on all nodes, from its start until no part of it is left."""

    def __init__(
        self, agents: Sequence[Connection], spec: TrialSpec, ranks: int, address: str, listener: Listener
    ) -> None:
        self._agents, self._spec, self._listener = agents, spec, listener
        self._shares = [Share(first=index * ranks, count=ranks, address=address) for index in range(len(agents))]
        self._events: list[list[Event]] = [[] for _ in range(spec.world_size)]
        self._running: set[int] = set()
        self._parts: dict[int, TrialRun] = {}
        self._begun = now()
        self._stop: Ending | None = None
        self._ended_early: float | None = None
        self._told: float | None = None

    @property
    def is_over(self) -> bool:
        """Every part that was started has ended, so the agents can run another trial."""
        return bool(self._parts) and not self._running

    def follow(self, deadlines: Deadlines, cancelled: Callable[[], bool]) -> None:
        """Run it to its end, or until a node is lost: its ranks end by themselves, but its agent is of no use now."""
        self._start(0, deadlines, port=0)
        while self._running:
            select.select([agent.stdout for agent in self._agents], [], [], _TICK_SECONDS)
            for index, agent in enumerate(self._agents):
                events = agent.poll()
                if events is None:
                    return self._lose(index)
                for event in events:
                    if event["event"] == "port" and index == 0:
                        for other in range(1, len(self._agents)):
                            self._start(other, deadlines, port=event["port"])
                    self._take(index, event)
            if cancelled() and self._stop is None:
                self._stop = _INTERRUPTED
            if self._must_end() and self._told is None:
                self._told = now()
                for index in self._running:
                    self._agents[index].send("cancel")
            if self._told is not None and now() - self._told > _END_SECONDS:
                return self._lose(min(self._running))
        return None

    def joined(self) -> TrialRun:
        """What all nodes saw of it."""
        indices = sorted(self._parts)
        run = merged(
            self._spec,
            [self._parts[index] for index in indices],
            [self._agents[index].name for index in indices],
            self._events,
            self._stop,
        )
        run.requested, run.ended = self._begun, now()
        run.nodes = tuple(
            agent.name for agent, share in zip(self._agents, self._shares, strict=True) for _ in range(share.count)
        )
        return run

    def _start(self, index: int, deadlines: Deadlines, port: int) -> None:
        agent = self._agents[index]
        share = replace(self._shares[index], port=port)
        stop_at = self._spec.stop_at + agent.ahead if self._spec.stop_at is not None else None
        spec = replace(self._spec, share=share, stop_at=stop_at)
        agent.send("run", spec=to_json(spec), deadlines=asdict(deadlines))
        self._running.add(index)

    def _take(self, index: int, event: Mapping[str, Any]) -> None:
        agent = self._agents[index]
        if event["event"] == "said":
            said = moved(parse_event(event["what"]), agent.ahead)
            self._events[event["rank"]].append(said)
            self._listener(event["rank"], said)
        elif event["event"] == "ended":
            self._end(index, from_wire(self._spec, event["run"], agent.ahead))
        elif event["event"] == "failed":
            stop = Ending(kind="environment", sentence=event["sentence"])
            self._end(index, TrialRun(spec=self._spec, events=[], stop=stop, started=now()))

    def _end(self, index: int, part: TrialRun) -> None:
        """A node's part has ended; early if one of its ranks has not reported that it is done."""
        self._running.discard(index)
        self._parts[index] = part
        share = self._shares[index]
        of_ranks = self._events[share.first : share.first + share.count]
        is_complete = all(events and isinstance(events[-1], DoneEvent) for events in of_ranks)
        if not is_complete and self._ended_early is None:
            self._ended_early = now()

    def _must_end(self) -> bool:
        early = self._ended_early
        return self._stop is not None or (early is not None and now() - early > _GRACE_SECONDS)

    def _lose(self, index: int) -> None:
        name, rank = self._agents[index].name, self._shares[index].first
        self._stop = Ending(kind="lost_server", rank=rank, sentence=f"node {name} was lost during the trial")
