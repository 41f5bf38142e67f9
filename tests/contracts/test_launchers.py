"""The contract of every launcher: a trial is run to its end, and nothing of it is left."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from helpers import WORLD_SIZE, Bench, tiny_trial
from helpers.clusters import Cluster, Slurm

from ladder.events.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, StepEvent
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.launch.nodes.connection import Node
from ladder.launch.nodes.hostfile import hostfile_nodes
from ladder.launch.nodes.ray_cluster import ray_nodes
from ladder.launch.nodes.slurm import slurm_nodes
from ladder.launch.watch import now
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import read_machine
from ladder.units import MIB

Kind = TypeVar("Kind")
OverNodes = Callable[[Sequence[Node]], AbstractContextManager[Bench]]


@pytest.fixture(scope="module")
def cold_bench(local_bench: Callable[..., Bench]) -> Iterator[Bench]:
    bench = local_bench(cold=True)
    yield bench
    bench.launcher.close()
    assert bench.processes() == []


@pytest.fixture(scope="module")
def bench_on_paper() -> Bench:
    cancellation: list[bool] = []
    launcher = SimulatedLauncher(read_machine("a100-40"), cancelled=lambda: bool(cancellation))
    return Bench(launcher, cancellation, "ladder-test-on-paper", has_processes=False)


@pytest.fixture(scope="module")
def bench_of_steps(slurm: Slurm, bench_over: OverNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Steps in a job of two nodes, as `salloc` and `sbatch` give one."""
    folder = tmp_path_factory.mktemp("allocation")
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--wrap=sleep 1000", folder=folder)
    slurm.wait_for(job, "RUNNING")
    with as_on(slurm, "SLURM_CONF"):
        allocation = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
        with bench_over(slurm_nodes(2, allocation)) as bench:
            yield bench
    slurm.run("scancel", job, folder=folder)


@pytest.fixture(scope="module")
def bench_over_ssh(ssh: Cluster, bench_over: OverNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The hosts of a hostfile."""
    hosts = tmp_path_factory.mktemp("ssh") / "hosts"
    hosts.write_text("worker-1 slots=1\nworker-2 slots=1\n")
    with as_on(ssh), bench_over(hostfile_nodes(hosts, None)[0]) as bench:
        yield bench


@pytest.fixture(scope="module")
def bench_of_ray(ray: Cluster, bench_over: OverNodes) -> Iterator[Bench]:
    """Actors on two nodes of Ray."""
    with as_on(ray, "RAY_ADDRESS"), bench_over(ray_nodes(2, 0)) as bench:
        yield bench


@contextmanager
def as_on(cluster: Cluster, *names: str) -> Iterator[None]:
    """With the variables by which programs find the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", *names):
            patch.setenv(name, cluster.environment[name])
        yield


# The fixtures of a bench with each launcher. A launcher to come is one more word.
# Of a cluster, at night: tests/cluster has whole tunes with each.
QUICK_TO_START = [
    "warm_bench",
    "bench_on_paper",
    "nodes_bench",
    *(pytest.param(name, marks=pytest.mark.night) for name in ("bench_of_steps", "bench_over_ssh", "bench_of_ray")),
]
LAUNCHERS = [*QUICK_TO_START, "cold_bench"]


@pytest.fixture(scope="module", params=LAUNCHERS)
def bench(request: pytest.FixtureRequest) -> Bench:
    bench: Bench = request.getfixturevalue(request.param)
    return bench


@pytest.fixture(scope="module", params=QUICK_TO_START)
def quick_bench(request: pytest.FixtureRequest) -> Bench:
    """A cold launcher's ranks are a warm one's, forked seconds later."""
    bench: Bench = request.getfixturevalue(request.param)
    return bench


@pytest.fixture(scope="module", params=[name for name in QUICK_TO_START if name != "nodes_bench"])
def ranks_bench(request: pytest.FixtureRequest) -> Bench:
    """For what the ranks decide among themselves, wherever they are."""
    bench: Bench = request.getfixturevalue(request.param)
    return bench


def of_kind(run: TrialRun, kind: type[Kind]) -> list[list[Kind]]:
    return [[event for event in events if isinstance(event, kind)] for events in run.events]


def assert_measured(run: TrialRun, bench: Bench) -> None:
    """Every rank reports every candidate and that it is done, and nothing of the trial is left."""
    keys = [candidate.key for candidate in run.spec.candidates]
    assert run.stop is None
    assert run.killed == frozenset()
    assert run.exits == dict.fromkeys(range(WORLD_SIZE), 0)
    assert [[event.candidate for event in events] for events in of_kind(run, MeasuredEvent)] == [keys] * WORLD_SIZE
    assert all(isinstance(events[-1], DoneEvent) for events in run.events)
    assert run.requested < run.started < run.ended
    assert bench.ranks() == []


def test_a_trial_is_measured_by_every_rank_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    run = bench.run(tiny_trial(tmp_path / 'it\'s "0001" é', 1, 2))
    assert_measured(run, bench)
    for measured in of_kind(run, MeasuredEvent):
        for event in measured:
            assert min(event.boundary_seconds + event.accumulate_seconds) > 0
            assert 0 < event.peak_device < run.spec.memory_limit
            assert all(abs(loss - math.log(8192)) < 1 for loss in event.losses)  # an untrained model guesses
    timed = [[event.boundary_seconds for event in measured] for measured in of_kind(run, MeasuredEvent)]
    assert timed == timed[:1] * WORLD_SIZE  # all ranks know the time of the slowest
    for rank, events in enumerate(run.events):
        assert [event for heard, event in bench.events if heard == rank] == events
        assert [event.t for event in events] == sorted(event.t for event in events)


def test_running_out_of_memory_is_reported_and_ends_all_ranks_within_two_seconds(bench: Bench, tmp_path: Path) -> None:
    seconds: list[float] = []
    waiting: list[threading.Thread] = []

    def wait_for_the_end_of(ranks: list[psutil.Process], failed: float) -> None:
        _, alive = psutil.wait_procs(ranks, timeout=30)
        seconds.append(math.inf if alive else now() - failed)

    def watch(rank: int, event: Event) -> None:
        if isinstance(event, FailedEvent) and not waiting:
            waiting.append(threading.Thread(target=wait_for_the_end_of, args=(bench.ranks(), event.t)))
            waiting[0].start()

    run = bench.run(tiny_trial(tmp_path / "0001", 1, 256, memory_limit=160 * MIB), watch)
    waiting[0].join()
    assert seconds[0] < 2
    assert len(run.exits) == WORLD_SIZE
    assert bench.ranks() == []
    assert [len(events) for events in of_kind(run, MeasuredEvent)] == [1] * WORLD_SIZE  # the smaller one fits
    failures = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    causes = [event for event in failures if not event.consequence]
    assert causes
    for cause in causes:
        assert (cause.outcome, cause.candidate) == ("gpu_oom", run.spec.candidates[1].key)
        assert cause.bytes_asked is not None
        assert cause.bytes_free is not None
        assert cause.bytes_asked > cause.bytes_free
    assert not any(isinstance(event, DoneEvent) for events in run.events for event in events)


def test_a_cancelled_trial_says_so_leaves_no_process_and_the_next_is_measured(bench: Bench, tmp_path: Path) -> None:
    endless = StepPolicy(minimum=100_000, maximum=100_000)
    asked: list[float] = []

    def cancel_at_first_step(rank: int, event: Event) -> None:
        if isinstance(event, StepEvent) and not asked:
            assert len(bench.ranks()) >= WORLD_SIZE * bench.has_processes  # so the check below can fail
            asked.append(event.t)
            bench.cancel()

    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=endless), cancel_at_first_step)
    assert run.stop is not None
    assert run.stop.kind == "cancelled"
    assert run.killed == frozenset(range(WORLD_SIZE))
    assert bench.ranks() == []
    assert run.ended - asked[0] < 8  # a cold launcher also ends its server
    assert_measured(bench.run(tiny_trial(tmp_path / "0002", 1)), bench)


@pytest.mark.parametrize(("seconds", "num_measured"), [(1e-9, 1), (1e9, 2)])
def test_a_candidate_is_left_out_when_the_first_was_too_slow_for_it(
    ranks_bench: Bench, tmp_path: Path, seconds: float, num_measured: int
) -> None:
    spec = tiny_trial(tmp_path / "0001", 1, 2)
    first, second = spec.candidates
    spec = replace(spec, candidates=(first, replace(second, first_within=seconds)))
    run = ranks_bench.run(spec)
    assert run.stop is None
    assert [len(events) for events in of_kind(run, MeasuredEvent)] == [num_measured] * WORLD_SIZE
    assert all(isinstance(events[-1], DoneEvent) for events in run.events)


@pytest.mark.parametrize(("seconds", "is_early"), [(0.0, True), (5.0, False)])
def test_a_candidate_that_loses_is_left_once_its_steps_get_no_shorter_but_not_before_some_time(
    ranks_bench: Bench, tmp_path: Path, seconds: float, is_early: bool
) -> None:
    policy = StepPolicy(minimum=1000, maximum=1000, seconds=600, loser_seconds=seconds)
    spec = tiny_trial(tmp_path / "0001", 1, steps=policy)
    loser = replace(spec.candidates[0], beat_step_seconds=1e-9)
    run = ranks_bench.run(replace(spec, candidates=(loser,)))
    for (event,) in of_kind(run, MeasuredEvent):
        assert isinstance(event, MeasuredEvent)
        assert (len(event.boundary_seconds) <= 5) is is_early
        assert len(event.boundary_seconds) < 1000


def test_a_spent_time_budget_leaves_one_step_of_the_first_candidate(quick_bench: Bench, tmp_path: Path) -> None:
    policy = StepPolicy(minimum=1000, maximum=1000, seconds=600)
    run = quick_bench.run(tiny_trial(tmp_path / "0001", 1, 2, stop_at=0.0, steps=policy))
    assert [len(events) for events in of_kind(run, MeasuredEvent)] == [1] * WORLD_SIZE
    assert {len(event.boundary_seconds) for (event,) in of_kind(run, MeasuredEvent)} == {1}
    assert all(isinstance(events[-1], DoneEvent) for events in run.events)
