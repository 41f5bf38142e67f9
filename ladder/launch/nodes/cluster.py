"""All nodes of a tune before its first trial: they are described, compared, and meet."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ladder.errors import EnvironmentFaultError
from ladder.events.protocol import Share
from ladder.launch.machine_measuring import MOST_SECONDS
from ladder.launch.nodes.connection import Connection, Node, close_all
from ladder.launch.watch import now
from ladder.machine.described import Gpu, Machine
from ladder.machine.known_machine import facts_of_nodes
from ladder.machine.lease import InterruptedWaitError, waiting
from ladder.machine.machine import CPU_RANKS
from ladder.machine.rates import Found, slowest

_PAUSE_SECONDS = (0.5, 3.0)
"""Between two tries to lease the GPUs of all nodes, at random: two tunes that each hold one node's would otherwise let
go and try again at the same moments. Chosen: a try takes a fraction of a second."""
_TICK_SECONDS = 0.1
"""Between two looks whether the user still waits. Chosen: a delay that nobody notices."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of each node is used."""

    gpus: int | None
    """As for `detect_machine`, but of one node."""
    gpu_memory: int | None
    host_memory: int | None
    """Bytes of one node, for all its ranks together; None takes what it has."""
    nvme_path: Path | None
    wait: bool = False
    """Wait until the GPUs of all nodes are free."""


class Cluster:
    """The agents on `nodes`, of which the first is where the ranks meet.

    If it waits for GPUs, `note` is told for whose, and `waited` for how many seconds.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        wanted: Wanted,
        cancelled: Callable[[], bool],
        note: Callable[[str], None] = lambda sentence: None,
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._nodes, self._wanted, self._cancelled = list(nodes), wanted, cancelled
        self._note, self._waited = note, waited
        self._agents: list[Connection] = []
        self._described: list[dict[str, Any]] = []
        self.names = [node.name for node in nodes]

    def machine(self) -> Machine:
        """All nodes as one machine, of which the smallest node decides; the GPUs are leased from here on.

        EnvironmentFaultError names the node that cannot be reached, lacks something, or is unlike the first.
        """
        self._connect()
        return machine_of(self._described, self.names, self._wanted.nvme_path)

    def opened(
        self, folder: Path, marker: str, job: Mapping[str, Any], environment: Mapping[str, str], *, cold: bool
    ) -> tuple[Sequence[Connection], str]:
        """The agents ready for trials in `folder`, and the address at which all reach the first node."""
        if not self._agents:
            self._connect()
        agents, self._agents = self._agents, []
        try:
            _require_shared(agents, folder)
            address = _meeting_address(agents, self._described[0]["addresses"])
            _open(agents, folder, marker, job, environment, address, cold=cold)
        except BaseException:
            close_all(agents)
            raise
        return agents, address

    def first(
        self, folder: Path, marker: str, job: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[Sequence[Connection], str]:
        """The first node's agent alone, ready for trials in `folder`; it stays here, to be opened again."""
        agents, address = self._agents[:1], self._described[0]["addresses"][0]
        _require_shared(agents, folder)
        _open(agents, folder, marker, job, environment, address, cold=False)
        return agents, address

    def close(self) -> None:
        """End the agents that were described and never opened."""
        close_all(self._agents)
        self._agents = []

    def measured(self, ranks: int, environment: Mapping[str, str]) -> Found:
        """What `ranks` on each described node measure; of the slowest node, and of the links between all."""
        agents, world = self._agents, ranks * len(self._agents)
        address = _meeting_address(agents, self._described[0]["addresses"])

        def begin(index: int, port: int) -> None:
            share = asdict(Share(first=index * ranks, count=ranks, address=address, port=port))
            agents[index].send("measure", share=share, world=world, environment=dict(environment))

        begin(0, port=0)
        port = agents[0].wait_for("port", seconds=MOST_SECONDS)["port"]
        for index in range(1, len(agents)):
            begin(index, port)
        found = []
        for agent in agents:
            answer = agent.wait_for("measured", seconds=MOST_SECONDS)
            failed = {name: f"{why}, on node {agent.name}" for name, why in answer["failed"].items()}
            found.append(Found(rates=answer["rates"], failed=failed))
        return slowest(found)

    def _connect(self) -> None:
        """Start all agents at once, and have each describe its node."""
        try:
            for node in self._nodes:
                self._agents.append(Connection(node, self._cancelled))
            for agent in self._agents:
                agent.wait_here()
            self._described = self._described_by_all()
            require_alike(self._described, self.names)
        except BaseException:
            self.close()
            raise

    def _described_by_all(self) -> list[dict[str, Any]]:
        """Each node once the GPUs of all are leased, at the same time."""
        wanted, told, began = self._wanted, "", now()
        while True:
            for agent in self._agents:
                agent.send(
                    "describe",
                    gpus=wanted.gpus,
                    gpu_memory=wanted.gpu_memory,
                    host_memory=wanted.host_memory,
                    nvme_path=str(wanted.nvme_path) if wanted.nvme_path is not None else None,
                )
            answers = [agent.wait_for("described", "busy") for agent in self._agents]
            busy = [
                f"Node {name}: {answer['sentence']}"
                for name, answer in zip(self.names, answers, strict=True)
                if answer["event"] == "busy"
            ]
            if not busy:
                return answers
            if not wanted.wait:
                raise EnvironmentFaultError(busy[0])
            if busy[0] != told:
                told = busy[0]
                self._note(waiting(told))
            self._pause()
            self._waited(now() - began)
            began = now()

    def _pause(self) -> None:
        """Leave the GPUs of all nodes to others for a while."""
        for agent in self._agents:
            agent.send("release")
        until = now() + random.uniform(*_PAUSE_SECONDS)
        while now() < until:
            if self._cancelled():
                raise InterruptedWaitError("interrupted while waiting for GPUs.")
            time.sleep(_TICK_SECONDS)


def machine_of(described: Sequence[Mapping[str, Any]], names: Sequence[str], nvme_path: Path | None) -> Machine:
    """All nodes as one machine: each rank has what it has on the smallest."""
    parts, count = [each["machine"] for each in described], len(names)
    first = parts[0]
    # Two ranks on one host show what ZeRO partitions; of several hosts each needs one only.
    ranks = len(first["gpus"]) or max(1, CPU_RANKS // count)
    speeds = [part["nvme_write_speed"] for part in parts]
    return Machine(
        device=first["device"],
        world_size=ranks * count,
        gpus=tuple(Gpu(**gpu) for gpu in first["gpus"]),
        memory_limit=min(part["memory_limit"] for part in parts),
        host_memory=min(part["host_memory"] for part in parts) * count,
        num_cores=min(part["num_cores"] for part in parts) * count,
        num_nodes=count,
        elsewhere=facts_of_nodes(names, described[0]["facts"]),
        nvme_path=nvme_path,
        nvme_write_speed=min(speeds) if None not in speeds else None,
        allocator=first["allocator"],
    )


def require_alike(described: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """EnvironmentFaultError if a node has other software or other GPUs than the first."""
    first = described[0]
    for name, other in zip(names[1:], described[1:], strict=True):
        for package, version in first["software"].items():
            if (there := other["software"].get(package)) != version:
                raise EnvironmentFaultError(
                    f"Node {name} has {package} {there or '(none)'} and node {names[0]} has {version or '(none)'}; "
                    "install the same on both."
                )
        here, there = (_gpus_of(each) for each in (first, other))
        if here != there:
            raise EnvironmentFaultError(
                f"Node {name} has {there} and node {names[0]} has {here}; choose nodes that are alike, or as many "
                "GPUs of each with --gpus."
            )


def _gpus_of(described: Mapping[str, Any]) -> str:
    gpus = described["machine"]["gpus"]
    return f"{len(gpus)} × {gpus[0]['name']}" if gpus else "no GPU"


def _open(
    agents: Sequence[Connection],
    folder: Path,
    marker: str,
    job: Mapping[str, Any],
    environment: Mapping[str, str],
    address: str,
    *,
    cold: bool,
) -> None:
    for agent in agents:
        agent.send(
            "open",
            marker=f"{marker}-{agent.name}",  # two nodes of a test may be one host
            job=dict(job),
            environment=dict(environment),
            log=str(folder.absolute() / f"server-{agent.name}.log"),
            address=address,
            cold=cold,
        )
    for agent in agents:
        agent.wait_for("opened")


def _require_shared(agents: Sequence[Connection], folder: Path) -> None:
    """EnvironmentFaultError names a node that does not see the run folder: it could not report there."""
    token = secrets.token_hex(16)
    file = folder / "seen_by_all_nodes"
    file.write_text(token, encoding="utf-8")
    try:
        for agent in agents:
            if agent.ask("see", "seen", path=str(file.absolute()))["content"] != token:
                raise EnvironmentFaultError(
                    f"Node {agent.name} does not see {folder.absolute()}; choose a --run-dir on a file system that "
                    "all nodes share."
                )
    finally:
        file.unlink(missing_ok=True)


def _meeting_address(agents: Sequence[Connection], addresses: Sequence[str]) -> str:
    """The first of the first node's `addresses` at which it answers all nodes."""
    token = secrets.token_hex(16)
    port = agents[0].ask("serve", "serving", token=token)["port"]
    for agent in agents:
        agent.send("reach", addresses=list(addresses), port=port, token=token)
    usable = list(addresses)
    for agent in agents:
        reached = agent.wait_for("reached")["addresses"]
        if not (usable := [address for address in usable if address in reached]):
            raise EnvironmentFaultError(
                f"Node {agent.name} does not reach node {agents[0].name} at {', '.join(addresses)}, port {port}; open "
                "the ports between the nodes, or choose others."
            )
    return usable[0]
