"""Fixtures: shapes and measurements, tests that start real trials on two CPU ranks, and tunes that are over."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL_TUNE, TINY_CONFIG, Bench, Finished, ladder
from helpers.clusters import Cluster as RunningCluster
from helpers.clusters import Slurm, running_slurm
from helpers.counts import fill_cache
from helpers.hosts import two_hosts_with_ssh, two_nodes_of_ray
from helpers.scripts import make_inputs
from helpers.shapes import Point, llama_like, measured

from ladder.launch.local import LocalLauncher
from ladder.launch.nodes.cluster import Cluster, Wanted
from ladder.launch.nodes.connection import Node
from ladder.launch.nodes.launcher import NodesLauncher
from ladder.launch.operator_builds import build_operators
from ladder.machine.cache import cache_folder
from ladder.machine.host import compiler
from ladder.machine.machine import detect_machine
from ladder.workload.workload import Workload

pytest_plugins = ["helpers.skips"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Contracts first: while operators compile, they need least of them."""
    items.sort(key=lambda item: item.path.parent.name != "contracts")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine's tunes taught must not decide a test, and no test teaches anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LADDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("LADDER_LEASES", str(tmp_path_factory.mktemp("leases")))  # tests run side by side on one CPU
        fill_cache()
        yield


@pytest.fixture(autouse=True)
def _no_earlier_steps(_own_cache: None) -> None:
    """Nor does one test teach another: with the step times of an earlier tune, the next one has fewer trials."""
    shutil.rmtree(cache_folder() / "steps", ignore_errors=True)


@pytest.fixture(name="llama_like")
def llama_like_fixture() -> Callable[..., Workload]:
    return llama_like


@pytest.fixture(scope="session")
def measured_points() -> list[Point]:
    return list(measured())


@pytest.fixture(scope="session")
def trial_environment() -> dict[str, str]:
    """What CPU ranks see beyond our own environment, with the operator that they all load built."""
    from ladder.launch.rank_environment import rank_environment  # here: most tests do without all that it imports

    if shutil.which(compiler()) is None:
        pytest.skip(f"there is no {compiler()} to build DeepSpeed's shm_comm, which all ranks on the CPU load")
    environment = rank_environment(detect_machine(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None))
    assert build_operators(["shm_comm"], environment) == {"shm_comm": None}
    return environment


@pytest.fixture(scope="session")
def trial_job() -> dict[str, Any]:
    """What a trial server preloads for the tiny model."""
    return {"model_config": TINY_CONFIG, "task": "causal-lm", "operators": ["shm_comm"]}


@pytest.fixture(scope="session")
def simulated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a whole tune on a machine on paper; its best_config.json lies beside it. Not to be changed."""
    from ladder.cli.main import main

    folder = tmp_path_factory.mktemp("simulated tune")
    options = ["--launcher", "simulated", "--machine", "a100-40", "--output", str(folder / "best_config.json")]
    assert main(["tune", "llama-2-7b", "--quiet", *options, "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes a folder that is the same for all pytest processes side by side: the first one that asks fills it."""
    ours = tmp_path_factory.getbasetemp()
    root = ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours

    def made(name: str, fill: Callable[[Path], object]) -> Path:
        folder, filled = root / name, root / f"{name} is filled"
        with (root / f"{name} lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not filled.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                folder.mkdir()
                fill(folder)
                filled.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def small_tune_done(
    made_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str]
) -> tuple[Path, Finished]:
    """A folder with an awkward name in which a real tune has run, on two CPU ranks, and what was seen of it."""

    def tune(folder: Path) -> None:
        done = ladder(*SMALL_TUNE, folder=folder)
        assert done.status == 0, done.errors
        (folder / "seen.json").write_text(json.dumps(asdict(done)))

    made = made_once('it\'s a "small" tune é', tune)
    folder = tmp_path_factory.mktemp("own copy") / made.name
    shutil.copytree(made, folder)
    return folder, Finished(**json.loads((folder / "seen.json").read_text()))


@pytest.fixture(scope="session")
def small_tune(small_tune_done: tuple[Path, Finished]) -> Path:
    """This process's copy of it: best_config.json and its companions, and ladder-runs/. Add files, but change none."""
    return small_tune_done[0]


@pytest.fixture(scope="session")
def script_inputs(made_once: Callable[..., Path]) -> Path:
    """The tiny models and data that the scripts of tests/scripts read. Copy the folder: scripts write into theirs."""
    return made_once("inputs", make_inputs)


@pytest.fixture(scope="session")
def local_bench(
    tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str], trial_job: dict[str, Any]
) -> Callable[..., Bench]:
    """Makes benches with a LocalLauncher, warm or cold; whoever asked for one closes its launcher."""

    def make(*, cold: bool = False) -> Bench:
        cancellation: list[bool] = []
        marker = f"ladder-test-{secrets.token_hex(8)}"
        launcher = LocalLauncher(
            marker=marker,
            job=trial_job,
            environment=trial_environment,
            log=tmp_path_factory.mktemp("server") / "server.log",
            cancelled=lambda: bool(cancellation),
            cold=cold,
        )
        return Bench(launcher, cancellation, marker)

    return make


@pytest.fixture(scope="session")
def bench_over(
    tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str], trial_job: dict[str, Any]
) -> Callable[[Sequence[Node]], AbstractContextManager[Bench]]:
    """Makes benches whose trials run over two nodes, with one rank on each."""

    @contextmanager
    def made(nodes: Sequence[Node]) -> Iterator[Bench]:
        cancellation: list[bool] = []
        marker = f"ladder-test-{secrets.token_hex(8)}"
        wanted = Wanted(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None)
        folder = tmp_path_factory.mktemp("nodes")
        with closing(Cluster(nodes, wanted, lambda: bool(cancellation))) as cluster:
            launcher = NodesLauncher(
                lambda: cluster.opened(folder, marker, trial_job, trial_environment, cold=False),
                ranks=cluster.machine().world_size // len(nodes),
                cancelled=lambda: bool(cancellation),
            )
            bench = Bench(launcher, cancellation, marker)
            with closing(launcher):
                yield bench
        assert bench.processes() == []

    return made


@pytest.fixture(scope="session")
def nodes_bench(bench_over: Callable[[Sequence[Node]], AbstractContextManager[Bench]]) -> Iterator[Bench]:
    """Two agents, as on two nodes. Here they are this host's processes."""
    with bench_over([Node(name=f"node{number}", command=list) for number in (1, 2)]) as bench:
        yield bench


@pytest.fixture(scope="session")
def ssh() -> Iterator[RunningCluster]:
    """Two hosts; see `two_hosts_with_ssh`."""
    with two_hosts_with_ssh() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def ray() -> Iterator[RunningCluster]:
    """Two nodes of Ray; see `two_nodes_of_ray`."""
    with two_nodes_of_ray() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm with the nodes node1 and node2; see `running_slurm`."""
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def warm_bench(local_bench: Callable[..., Bench]) -> Iterator[Bench]:
    """One warm server for all tests that leave a launcher working: its seconds of imports are paid once."""
    bench = local_bench()
    yield bench
    bench.launcher.close()
    assert bench.processes() == []
