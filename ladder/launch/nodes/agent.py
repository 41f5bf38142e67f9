"""The agent on one node: describes it, and runs its share of each trial. See `wire` for what it is told and answers.

It is a program of its own: srun or ssh starts it. It ends, with all it started, when its stdin ends, or when the host
of the controller does not answer any more.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ladder.errors import LadderError
from ladder.events.as_json import from_json, from_plain, to_json
from ladder.events.protocol import Event, Share, TrialSpec
from ladder.launch.base import Deadlines
from ladder.launch.local import LocalLauncher
from ladder.launch.machine_measuring import measure_share
from ladder.launch.nodes.network import (
    ALIVE_SECONDS,
    DOUBT_SECONDS,
    answering,
    interface_of,
    own_addresses,
    reachable,
    served,
)
from ladder.launch.nodes.wire import to_wire
from ladder.launch.trial_server import kill_marked
from ladder.launch.watch import now
from ladder.machine.interpreter import VARIABLE
from ladder.machine.known_machine import facts_of_host
from ladder.machine.lease import BusyGpusError, Leases
from ladder.machine.machine import detect_machine
from ladder.machine.nvme import check_nvme_path
from ladder.machine.versions import versions_of_ranks

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where gloo and NCCL read the network interface. Without it gloo takes the address that the host's own name has, which
on Debian is 127.0.1.1."""


class Agent:
    """Answers requests one by one in the main thread: the kernel ends a trial server with the thread that starts it."""

    def __init__(self, events: int) -> None:
        self._events, self._lock = events, threading.Lock()
        self.requests: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.stopped = threading.Event()
        """The trial that runs is to end."""
        self.gone = threading.Event()
        """The controller has gone."""
        self.heard = now()
        """When the controller last said something."""
        self._controller: str | None = None
        """An address at which its host answers, if there is one."""
        self._launcher: LocalLauncher | None = None
        self._met = threading.Event()
        """All nodes have found this one, or never will."""
        self._leases = Leases(cancelled=self.gone.is_set)
        self._uuids: tuple[str, ...] = ()
        self._marker = ""

    def tell(self, event: str, **content: Any) -> None:
        """Say something to the controller."""
        line = json.dumps({"event": event, **content}).encode() + b"\n"
        with self._lock, suppress(OSError):  # if it has gone, stdin ends too
            while line:
                line = line[os.write(self._events, line) :]

    def serve(self) -> None:
        """Answer requests until there are no more."""
        try:
            while (request := self.requests.get()) is not None:
                try:
                    getattr(self, f"_{request.pop('op')}")(**request)
                except (LadderError, OSError) as error:
                    self.tell("failed", sentence=str(error))
        finally:
            self._end()

    def _end(self) -> None:
        self._met.set()
        if self._launcher is not None:
            self._launcher.close()
        if self._marker:
            kill_marked(self._marker)
        self._leases.close()

    def leave(self) -> None:
        """End the trial that runs, and then everything."""
        self.gone.set()
        self.requests.put(None)

    def is_cut_off(self) -> bool:
        """Whether the controller is silent and its host answers no more. srun or ssh notice that after minutes."""
        address, silent = self._controller, now() - self.heard
        return address is not None and silent > DOUBT_SECONDS and answering([address]) is None

    def _clock(self) -> None:
        self.tell("clock", now=now())

    def _watch(self, addresses: list[str]) -> None:
        """Notice from now on if the controller, whose host has `addresses`, cannot be reached any more."""
        self._controller = answering(addresses)

    def _describe(self, gpus: int | None, nvme_path: str | None, **limits: int | None) -> None:
        """`gpus` and the memory limits as for `detect_machine`."""
        path = Path(nvme_path) if nvme_path is not None else None
        try:
            machine = detect_machine(gpus=gpus, nvme_path=path, choose=self._leases.choose, **limits)
        except BusyGpusError as error:
            self.tell("busy", sentence=str(error))
            return
        speed = check_nvme_path(path) if path is not None else None
        self._uuids = tuple(gpu.uuid for gpu in machine.gpus)
        self.tell(
            "described",
            machine={
                "device": machine.device,
                "gpus": [asdict(gpu) for gpu in machine.gpus],
                "memory_limit": machine.memory_limit,
                "host_memory": machine.host_memory,
                "num_cores": machine.num_cores,
                "nvme_write_speed": speed,
                "allocator": machine.allocator,
            },
            software=versions_of_ranks(),
            facts=facts_of_host(machine.device),
            addresses=own_addresses(),
        )

    def _release(self) -> None:
        """Hold no GPU while the tune waits for those of another node, so that two tunes cannot wait for each other."""
        self._leases.close()

    def _see(self, path: str) -> None:
        """What this node reads in a file that every node should see."""
        try:
            content: str | None = Path(path).read_text(encoding="utf-8")
        except OSError:
            content = None
        self.tell("seen", content=content)

    def _serve(self, token: str) -> None:
        """Let other nodes find out how they reach this one."""
        self._met.clear()
        self.tell("serving", port=served(token, self._met))

    def _reach(self, addresses: list[str], port: int, token: str) -> None:
        self.tell("reached", addresses=reachable(addresses, port, token))

    def _open(
        self, marker: str, job: Mapping[str, Any], environment: Mapping[str, str], log: str, address: str, cold: bool
    ) -> None:
        """Start the trial server, whose ranks meet at `address`."""
        self._met.set()
        if self._launcher is not None:  # of a look at a script
            self._launcher.close()
        self._marker = marker
        kill_marked(marker)
        self._launcher = LocalLauncher(
            marker=marker,
            job=job,
            environment=self._of_ranks(environment, address),
            log=Path(log),
            gpu_uuids=self._uuids,
            cancelled=lambda: self.stopped.is_set() or self.gone.is_set(),
            cold=cold,
            on_port=lambda port: self.tell("port", port=port),
        )
        self.tell("opened")

    def _measure(self, share: Mapping[str, Any], world: int, environment: Mapping[str, str]) -> None:
        """Measure the node's speeds, and with the others those of the links between all."""
        self._met.set()
        found = measure_share(
            "cuda" if self._uuids else "cpu",
            self._uuids,
            from_plain(Share, share),
            world,
            self._of_ranks(environment, share["address"]),
            on_port=lambda port: self.tell("port", port=port),
            cancelled=self.gone.is_set,
        )
        self.tell("measured", **found)

    def _of_ranks(self, environment: Mapping[str, str], address: str) -> dict[str, str]:
        """`environment` with this node's GPUs, and with the interface over which its ranks reach `address`."""
        interface = interface_of(address)
        network = {name: interface for name in _INTERFACES if interface and name not in os.environ}
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self._uuids)} if self._uuids else {}
        return {**environment, **network, **visible}

    def _load(self, operators: list[str]) -> None:
        assert self._launcher is not None
        self._launcher.load(operators)
        self.tell("loaded")

    def _run(self, spec: str, deadlines: Mapping[str, float]) -> None:
        """Run this node's share of a trial to its end."""
        assert self._launcher is not None
        share = from_json(TrialSpec, spec)
        share = replace(share, gpu_uuids=self._uuids)
        try:
            run = self._launcher.run(share, Deadlines(**deadlines), self._said)
        finally:
            self.stopped.clear()
        self.tell("ended", run=to_wire(run))

    def _said(self, rank: int, event: Event) -> None:
        self.tell("said", rank=rank, what=to_json(event))


def _read(agent: Agent, requests: int) -> None:
    """Hand over requests as they come. To end a trial cannot wait until the request before it is answered."""
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            request, agent.heard = json.loads(line), now()
            if request["op"] == "alive":
                continue
            if request["op"] == "cancel":
                agent.stopped.set()
                continue
            if request["op"] == "run":  # the end of an earlier trial may have been asked for too late
                agent.stopped.clear()
            agent.requests.put(request)
    agent.leave()


def main() -> int:
    """Run the agent until its stdin ends, or it gets SIGTERM."""
    requests, events = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # prints must not mix with the events
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # ssh starts us without the environment's programs, of which torch calls ninja even for operators that are built.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    if len(sys.argv) > 1:  # ssh passes no variables on
        os.environ[VARIABLE] = sys.argv[1]
    agent = Agent(events)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the controller handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: agent.leave())
    threading.Thread(target=_read, args=(agent, requests), daemon=True).start()
    threading.Thread(target=_stay_in_touch, args=(agent,), daemon=True).start()
    agent.tell("here", pid=os.getpid(), step=os.environ.get("SLURM_STEP_ID", ""), addresses=own_addresses())
    agent.serve()
    return 0


def _stay_in_touch(agent: Agent) -> None:
    while not agent.gone.wait(ALIVE_SECONDS):
        agent.tell("alive")
        if agent.is_cut_off():
            agent.leave()


if __name__ == "__main__":
    sys.exit(main())
