"""A link between two hosts that is cut during a trial, and programs that only have to wait: which of them is a loss?

The hosts are network namespaces of this machine, with an sshd on each; they need root.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from faults.provocation import ENDLESS, Once, a_step_of, records_of
from helpers import Bench, is_alive, processes_with, tiny_trial
from helpers.clusters import Cluster
from helpers.hosts import set_link

from ladder.errors import EnvironmentFaultError
from ladder.launch.nodes import connection
from ladder.launch.nodes.connection import Node
from ladder.launch.nodes.hostfile import hostfile_nodes

FREE_SECONDS = 5.0
EARLIER: list[psutil.Process] = []
"""Agents of other tests in this process."""


@pytest.fixture(scope="module")
def hosts(
    ssh: Cluster,
    bench_over: Callable[[Sequence[Node]], AbstractContextManager[Bench]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Bench]:
    EARLIER.extend(agents())
    file = tmp_path_factory.mktemp("hosts") / "hosts"
    file.write_text("worker-1 slots=1\nworker-2 slots=1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", ssh.environment["PATH"])
        with bench_over(hostfile_nodes(file, None)[0]) as bench:
            yield bench


def agents() -> list[psutil.Process]:
    """On both hosts, in the order of their start."""
    ours = processes_with("LADDER_CACHE", os.environ["LADDER_CACHE"])
    found = {each for each in ours if each.cmdline()[-1:] == ["ladder.launch.nodes.agent"]}
    return sorted(found.difference(EARLIER), key=lambda each: each.create_time())


def test_a_link_that_is_cut_frees_both_hosts_within_five_seconds(hosts: Bench, tmp_path: Path) -> None:
    ours: list[psutil.Process] = []

    def cut() -> None:
        ours.extend([*agents(), *hosts.processes()])
        set_link(2, "down")

    happen = Once(hosts, a_step_of(0), cut)
    try:
        run = hosts.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), happen)
        assert len(ours) == 6  # on each host an agent, a server and a rank
        assert run.ended - happen.at < FREE_SECONDS
        psutil.wait_procs(ours, timeout=FREE_SECONDS - (run.ended - happen.at))
        assert [each for each in ours if is_alive(each)] == []
        assert run.stop is not None
        assert (run.stop.kind, run.stop.sentence) == ("lost_server", "node worker-2 was lost during the trial")
        with pytest.raises(EnvironmentFaultError, match=r"Node worker-2 cannot run trials: .*(No route|timed out)"):
            hosts.run(tiny_trial(tmp_path / "0002", 1))
    finally:
        set_link(2, "up")
    assert [record.outcome.kind for record in records_of(hosts.run(tiny_trial(tmp_path / "0003", 1)))] == ["fits"]


def go_on_for_eight_seconds(bench: Bench, folder: Path, act: Callable[[], object]) -> None:
    """Run a trial in which `act` happens. It must end because we say so, and not because a node is lost."""
    timer = threading.Timer(8.0, bench.cancel)

    def begin() -> None:
        act()
        timer.start()

    run = bench.run(tiny_trial(folder / "0001", 1, steps=ENDLESS), Once(bench, a_step_of(0), begin))
    timer.join()
    assert run.stop is not None
    assert run.stop.kind == "cancelled"


def test_an_agent_that_has_to_wait_on_a_host_that_answers_costs_no_trial(hosts: Bench, tmp_path: Path) -> None:
    """As where memory is short: the kernel answers, the program does not."""

    def stop_for_six_seconds() -> None:
        agent = agents()[1]
        agent.suspend()
        threading.Timer(6.0, agent.resume).start()

    go_on_for_eight_seconds(hosts, tmp_path, stop_for_six_seconds)


def test_a_tune_that_has_to_wait_on_a_host_that_answers_costs_no_trial(
    hosts: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z: the agents hear nothing."""
    go_on_for_eight_seconds(hosts, tmp_path, lambda: monkeypatch.setattr(connection, "ALIVE_SECONDS", 100.0))
