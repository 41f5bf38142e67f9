"""However the trial server ends or stops to answer, its ranks end, nobody is blamed, and the next trial works."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults.provocation import ENDLESS, FaultyBench, Once, a_step_of, records_of
from helpers import is_alive, tiny_trial, wait_until

from ladder.events.protocol import DoneEvent, Event, PhaseEvent
from ladder.launch.watch import now

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture(scope="module")
def mortal_bench(faulty_bench: Callable[..., FaultyBench]) -> Iterator[FaultyBench]:
    """Its server does not outlive these tests, and is given up after two seconds of silence."""
    bench = faulty_bench(kill_seconds=2.0)
    yield bench
    bench.launcher.close()
    assert bench.processes() == []


def kill(bench: FaultyBench) -> None:
    bench.server().kill()


def leave_with_status_zero(bench: FaultyBench) -> None:
    bench.provoke(bench.server(), "leave_with_status_zero")


@pytest.mark.parametrize("end", [kill, leave_with_status_zero])
def test_a_server_that_ends_takes_its_ranks_along_and_blames_nobody(
    mortal_bench: FaultyBench, tmp_path: Path, end: Callable[[FaultyBench], None]
) -> None:
    bench = mortal_bench
    happen = Once(bench, a_step_of(0), lambda: end(bench))
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), happen)
    assert happen.at
    assert run.stop is not None
    assert run.stop.kind == "lost_server"
    assert run.ended - happen.at < 2
    assert not any(map(is_alive, happen.processes))
    assert bench.processes() == []
    assert [record.outcome.kind for record in records_of(run)] == ["crash"]  # which the tuner does not keep


def test_a_stopped_server_is_given_up_and_what_its_ranks_had_measured_stands(
    mortal_bench: FaultyBench, tmp_path: Path
) -> None:
    bench, interrupted = mortal_bench, list[float]()

    def is_begun(rank: int, event: Event) -> bool:
        return isinstance(event, PhaseEvent) and event.phase == "engine"

    def stop_then_cancel(rank: int, event: Event) -> None:
        stop(rank, event)
        if isinstance(event, DoneEvent) and not interrupted:
            interrupted.append(now())
            bench.cancel()

    # Stopped long before its ranks end: it can never say that they did.
    stop = Once(bench, is_begun, lambda: bench.server().suspend())
    run = bench.run(tiny_trial(tmp_path / "0001", 1), stop_then_cancel)
    assert interrupted
    assert 2 <= run.ended - interrupted[0] < 12
    assert bench.processes() == []
    assert [record.outcome.kind for record in records_of(run)][:1] == ["fits"]


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup whose frozen members do not end even after SIGKILL, like a process that a driver holds."""
    group = FREEZER / f"ladder-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a cgroup v1 freezer and the right to use it")
    yield group
    (group / "freezer.state").write_text("THAWED")
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_rank_that_not_even_sigkill_ends_is_named_and_the_tune_does_not_wait_for_ever(
    mortal_bench: FaultyBench, tmp_path: Path, freezer: Path
) -> None:
    bench, pids = mortal_bench, list[int]()

    def freeze() -> None:
        pids.append(bench.rank(1).pid)
        (freezer / "cgroup.procs").write_text(str(pids[0]))
        (freezer / "freezer.state").write_text("FROZEN")
        bench.cancel()

    happen = Once(bench, a_step_of(1), freeze)
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), happen)
    assert run.stop is not None
    assert run.stop.kind == "environment"
    assert f"left process {pids[0]}, which does not end even after SIGKILL" in run.stop.sentence
    assert now() - happen.at < 25
