"""Fixtures for real faults: benches whose ranks and server can be provoked, and checks of what is left after them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.fake_nvml import FakeGpus
from faults.groups import CGROUPS, own_group
from faults.provocation import FaultyBench, Provocation
from helpers import wait_until

from ladder.launch.local import LocalLauncher
from ladder.units import MIB

LIMIT_BYTES = 256 * MIB


@pytest.fixture(scope="session")
def faulty_bench(
    tmp_path_factory: pytest.TempPathFactory, trial_environment: dict[str, str], trial_job: dict[str, Any]
) -> Callable[..., FaultyBench]:
    """Makes faulty benches; whoever asked for one closes its launcher."""

    def make(**options: Any) -> FaultyBench:
        folder = tmp_path_factory.mktemp("server")
        cancellation: list[bool] = []
        marker = f"ladder-test-{secrets.token_hex(8)}"
        provoke = Provocation(folder / "fault")
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        launcher = LocalLauncher(
            marker=marker,
            job=trial_job | {"preload": ["inside"]},
            environment=trial_environment | {"PYTHONPATH": path, "LADDER_TEST_FAULT": str(provoke.file)},
            log=folder / "server.log",
            cancelled=lambda: bool(cancellation),
            **options,
        )
        return FaultyBench(launcher, cancellation, marker, provoke=provoke)

    return make


@pytest.fixture(scope="session")
def shared_bench(faulty_bench: Callable[..., FaultyBench]) -> Iterator[FaultyBench]:
    """One warm server for all faults that leave it alive: its seven seconds of imports are paid once."""
    bench = faulty_bench()
    yield bench
    bench.launcher.close()
    assert bench.processes() == []


@pytest.fixture
def bench(shared_bench: FaultyBench) -> Iterator[FaultyBench]:
    """The shared bench; whatever happens on it, nothing but its server may be left."""
    shared_bench.provoke.happened_file.unlink(missing_ok=True)
    yield shared_bench
    assert shared_bench.ranks() == []
    for server in shared_bench.processes():  # a test that failed may have left none
        assert server.children(recursive=True) == []


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup (v1) below our own that holds little; removed afterwards."""
    group = CGROUPS / "memory" / own_group("memory") / f"ladder-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make a memory cgroup (v1)")
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield group
    for pid in (group / "cgroup.procs").read_text().split():  # the shared server goes back to where it was
        (group.parent / "cgroup.procs").write_text(pid)
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Built once for each driver that is asked for."""
    built: dict[tuple[str, ...], Path] = {}

    def build(*defines: str) -> Path:
        if defines not in built:
            built[defines] = FakeGpus(tmp_path_factory.mktemp("nvml")).build(*defines).folder / "lib"
        return built[defines]

    return build


@pytest.fixture
def gpus(tmp_path: Path, libraries: Callable[..., Path]) -> FakeGpus:
    """Two free GPUs under a driver of today."""
    fake = FakeGpus(tmp_path, {"LD_LIBRARY_PATH": str(libraries())})
    fake.set(count=2)
    return fake
