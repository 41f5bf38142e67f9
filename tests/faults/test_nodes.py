"""Whatever ends on one of several nodes, the trial ends on all of them within seconds, and the next one works.

Both nodes are this host; the programs that would start on them start here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults.provocation import ENDLESS, Once, a_step_of, records_of
from helpers import Bench, is_alive, tiny_trial, wait_until

from ladder.errors import EnvironmentFaultError
from ladder.events.protocol import Event, MeasuredEvent, PhaseEvent
from ladder.launch.base import Deadlines
from ladder.launch.nodes import connection
from ladder.launch.nodes.cluster import Cluster, Wanted
from ladder.launch.nodes.connection import Node
from ladder.launch.nodes.launcher import NodesLauncher

Command = Callable[[Sequence[str]], list[str]]
WANTED = Wanted(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None)
FREE_SECONDS = 5.0


def agents_here() -> list[psutil.Process]:
    """All that this process has started, in that order."""
    children = (each for each in psutil.Process().children() if is_alive(each))
    return sorted(
        (it for it in children if "ladder.launch.nodes.agent" in it.cmdline()), key=lambda it: it.create_time()
    )


@dataclass
class NodesBench(Bench):
    """With agents that can be found, among those of other tests."""

    others: list[psutil.Process] = field(default_factory=agents_here)

    def agents(self) -> list[psutil.Process]:
        return [each for each in agents_here() if each not in self.others]


def made_bench(
    folder: Path, environment: dict[str, str], job: dict[str, Any], second: Command = list
) -> tuple[NodesBench, Cluster]:
    """Of two nodes; `second` starts programs on the second one."""
    cancellation: list[bool] = []
    nodes = [Node(name="node1", command=list), Node(name="node2", command=second)]
    cluster = Cluster(nodes, WANTED, lambda: bool(cancellation))
    marker = f"ladder-test-{folder.name}"
    launcher = NodesLauncher(
        lambda: cluster.opened(folder, marker, job, environment, cold=False),
        ranks=1,
        cancelled=lambda: bool(cancellation),
    )
    return NodesBench(launcher, cancellation, marker), cluster


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str], trial_job: dict[str, Any]
) -> Iterator[NodesBench]:
    bench, _ = made_bench(tmp_path_factory.mktemp("nodes"), trial_environment, trial_job)
    yield bench
    bench.launcher.close()
    assert bench.processes() == []
    assert bench.agents() == []


def the_first_agent(bench: NodesBench) -> psutil.Process:
    return bench.agents()[0]


def the_second_agent(bench: NodesBench) -> psutil.Process:
    return bench.agents()[1]


def a_server(bench: NodesBench) -> psutil.Process:
    return the_second_agent(bench).children()[0]


def a_rank(bench: NodesBench) -> psutil.Process:
    return a_server(bench).children()[0]


@pytest.mark.parametrize("victim", [a_rank, a_server, the_first_agent, the_second_agent])
def test_a_process_that_is_killed_on_one_node_frees_both_within_five_seconds(
    nodes: NodesBench, tmp_path: Path, victim: Callable[[NodesBench], psutil.Process]
) -> None:
    ranks: list[psutil.Process] = []

    def kill() -> None:
        ranks.extend(nodes.ranks())
        victim(nodes).kill()

    happen = Once(nodes, a_step_of(0), kill)
    run = nodes.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), happen)
    assert len(ranks) == 2
    assert run.ended - happen.at < FREE_SECONDS
    wait_until(lambda: not any(map(is_alive, ranks)), FREE_SECONDS - (run.ended - happen.at))
    assert nodes.ranks() == []
    (record,) = records_of(run)
    assert record.outcome.kind == "crash"
    assert f"node{1 if victim is the_first_agent else 2}" in record.outcome.sentence
    again = nodes.run(tiny_trial(tmp_path / "0002", 1))
    assert [record.outcome.kind for record in records_of(again)] == ["fits"]


def test_a_node_that_hangs_is_lost_and_its_ranks_end_with_it(
    nodes: NodesBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_SILENT_SECONDS", 3.0)
    monkeypatch.setattr(connection, "_END_SECONDS", 1.0)
    happen = Once(nodes, a_step_of(0), lambda: the_second_agent(nodes).suspend())
    run = nodes.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), happen)
    assert run.stop is not None
    assert (run.stop.kind, run.stop.sentence) == ("lost_server", "node node2 was lost during the trial")
    wait_until(lambda: nodes.ranks() == [], FREE_SECONDS)
    assert [record.outcome.kind for record in records_of(nodes.run(tiny_trial(tmp_path / "0002", 1)))] == ["fits"]


def test_a_rank_that_hangs_on_one_node_is_named_and_not_the_one_that_waits_for_it(
    nodes: NodesBench, tmp_path: Path
) -> None:
    def begins_an_engine(heard: int, event: Event) -> bool:
        return heard == 1 and isinstance(event, PhaseEvent) and event.phase == "engine"

    stop = Once(nodes, begins_an_engine, lambda: a_rank(nodes).suspend())
    # It may have left its engine by the time it is stopped.
    deadlines = Deadlines(engine=4.0, first_step=4.0, step=4.0)
    run = nodes.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), stop, deadlines)
    assert run.ended - stop.at < 4.0 + FREE_SECONDS
    assert not any(map(is_alive, stop.processes))
    (record,) = records_of(run)
    assert (record.outcome.kind, record.outcome.rank) == ("hang", 1)
    assert record.outcome.sentence.startswith("rank 1 is stopped (SIGSTOP)")
    assert record.outcome.sentence.endswith("(node node2)")


def test_a_rank_that_the_kernel_kills_for_memory_on_one_node_ends_the_trial_on_both(
    nodes: NodesBench, tmp_path: Path, small_group: Path
) -> None:
    nodes.run(tiny_trial(tmp_path / "0001", 1))  # the servers are up
    (small_group / "cgroup.procs").write_text(str(a_server(nodes).pid))
    run = nodes.run(tiny_trial(tmp_path / "0002", 256, memory_limit=1 << 40))
    assert run.exits[1] == -signal.SIGKILL
    assert run.oom_kills >= 1
    assert nodes.ranks() == []
    (record,) = records_of(run)
    assert (record.outcome.kind, record.outcome.rank) == ("host_oom", 1)
    assert "because host memory ran out" in record.outcome.sentence
    assert record.outcome.sentence.endswith("(node node2)")


def test_a_node_whose_clock_is_an_hour_ahead_and_that_knows_no_path_to_our_python_s_programs_runs_trials(
    tmp_path: Path, trial_environment: dict[str, str], trial_job: dict[str, Any]
) -> None:
    """Over ssh no environment is activated: torch looks for ninja whenever it loads an operator."""
    ahead = ["unshare", "--time", "--monotonic=3600", "--boottime=3600", "--fork", "--kill-child"]
    if subprocess.run([*ahead, "true"], check=False, capture_output=True).returncode:
        ahead = []  # this machine allows no time namespaces
    bare = [*ahead, "env", "PATH=/usr/bin:/bin"]
    bench, cluster = made_bench(tmp_path, trial_environment, trial_job, lambda program: [*bare, *program])
    try:
        run = bench.run(tiny_trial(tmp_path / "0001", 1))
        paths = {each.environ()["PATH"] for each in bench.processes()}
    finally:
        bench.launcher.close()
        cluster.close()
    ours, theirs = ([event for event in events if isinstance(event, MeasuredEvent)] for events in run.events)
    assert abs(ours[0].t - theirs[0].t) < 2
    assert abs(ours[0].began - theirs[0].began) < 2
    assert run.requested < run.started < ours[0].began < run.ended
    assert f"{Path(sys.executable).parent}:/usr/bin:/bin" in paths
    if not ahead:
        pytest.skip("this machine allows no time namespaces, so the clocks were the same")


def test_a_run_folder_that_one_node_does_not_see_is_found_before_the_first_trial(
    tmp_path: Path, trial_environment: dict[str, str], trial_job: dict[str, Any]
) -> None:
    hidden = tmp_path / "run"
    hidden.mkdir()
    hiding = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
    if subprocess.run([*hiding, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespaces")
    before = agents_here()
    bench, cluster = made_bench(hidden, trial_environment, trial_job, lambda program: [*hiding, *program])
    with pytest.raises(EnvironmentFaultError, match=r"Node node2 does not see .*choose a --run-dir"):
        bench.run(tiny_trial(hidden / "0001", 1))
    cluster.close()
    assert agents_here() == before


def test_a_tune_that_is_interrupted_while_a_node_gets_ready_blames_nobody(
    tmp_path: Path, trial_environment: dict[str, str], trial_job: dict[str, Any]
) -> None:
    before = agents_here()
    bench, cluster = made_bench(tmp_path, trial_environment, trial_job, lambda program: ["sleep", "60"])
    timer = threading.Timer(1.0, bench.cancel)
    timer.start()
    run = bench.run(tiny_trial(tmp_path / "0001", 1))
    timer.join()
    cluster.close()
    assert run.stop is not None
    assert run.stop.kind == "cancelled"
    assert [record.outcome.kind for record in records_of(run)] == ["cancelled"]
    assert run.ended - run.requested < 12  # seconds, of which `sleep` is given eight
    assert agents_here() == before


def test_a_node_with_another_version_of_a_package_is_named_before_the_first_trial(tmp_path: Path) -> None:
    about = tmp_path / "accelerate-0.1.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 0.1\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))

    def second(program: Sequence[str]) -> list[str]:
        return ["env", f"PYTHONPATH={path}", *program]

    before = agents_here()
    cluster = Cluster([Node(name="node1", command=list), Node(name="node2", command=second)], WANTED, lambda: False)
    with pytest.raises(EnvironmentFaultError, match=r"Node node2 has accelerate 0\.1 and node node1 has \d"):
        cluster.machine()
    assert agents_here() == before


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (lambda program: [shutil.which("false") or "false"], "Node node2 cannot run trials: its connection ended"),
        (lambda program: [sys.executable, "-c", "import sys; sys.exit('no such host')"], "no such host"),
        (lambda program: ["env", "PYTHONPATH=/nowhere", sys.executable, "-S", *program[1:]], "ModuleNotFoundError"),
    ],
)
def test_a_node_that_cannot_be_reached_is_named_with_what_was_said(second: Command, said: str) -> None:
    before = agents_here()
    cluster = Cluster([Node(name="node1", command=list), Node(name="node2", command=second)], WANTED, lambda: False)
    with pytest.raises(EnvironmentFaultError, match=said):
        cluster.machine()
    assert agents_here() == before
