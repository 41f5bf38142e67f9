"""However a rank fails, its trial ends with it: typed, with the right rank named, and with nothing left."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import psutil
import pytest
from faults.mounts import fill, mounted
from faults.provocation import ENDLESS, FaultyBench, Once, a_step_of, outcome_of, records_of
from helpers import WORLD_SIZE, is_alive, tiny_trial

from ladder.events.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, PhaseEvent
from ladder.events.step_policy import StepPolicy
from ladder.launch.base import Deadlines
from ladder.launch.watch import now
from ladder.tuning.tune_events import TrialEnds
from ladder.units import MIB
from ladder.watch.plain import plain_lines

RANKS = pytest.mark.parametrize("rank", range(WORLD_SIZE))
ROOM_BYTES = 1 << 40


@RANKS
def test_a_rank_killed_by_somebody_is_a_crash_of_that_rank_and_no_oom(
    bench: FaultyBench, tmp_path: Path, rank: int
) -> None:
    kill = Once(bench, a_step_of(0), lambda: bench.rank(rank).kill())
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), kill)
    assert run.exits[rank] == -signal.SIGKILL
    assert rank not in run.killed
    assert run.oom_kills == 0
    outcome = outcome_of(run)
    assert (outcome.kind, outcome.rank) == ("crash", rank)
    assert f"rank {rank} was killed by SIGKILL" in outcome.sentence
    assert run.ended - kill.at < 2
    assert not any(map(is_alive, kill.processes))


def test_a_rank_that_dies_of_a_segmentation_fault_leaves_its_stack_in_its_log(
    bench: FaultyBench, tmp_path: Path
) -> None:
    crash = Once(bench, a_step_of(0), lambda: bench.rank(1).send_signal(signal.SIGSEGV))
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), crash)
    assert run.exits[1] == -signal.SIGSEGV
    assert "rank 1 was killed by SIGSEGV" in outcome_of(run).sentence
    log = (tmp_path / "0001" / "rank1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "in measure_all" in log


def test_a_rank_that_cannot_write_its_report_is_the_disk_s_fault(bench: FaultyBench, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=1m") as disk:
        full = Once(bench, a_step_of(1), lambda: fill(disk))
        run = bench.run(tiny_trial(disk / "0001", 1, steps=ENDLESS), full)
    assert full.at
    assert run.stop is not None
    assert run.stop.kind == "environment"
    assert "probably because the disk is full" in run.stop.sentence


@RANKS
def test_a_stopped_rank_is_a_hang_of_that_rank_and_not_of_the_peer_that_waits_for_it(
    bench: FaultyBench, tmp_path: Path, rank: int
) -> None:
    def begins_an_engine(heard: int, event: Event) -> bool:
        return heard == rank and isinstance(event, PhaseEvent) and event.phase == "engine"

    stop = Once(bench, begins_an_engine, lambda: bench.rank(rank).suspend())
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), stop, Deadlines(engine=4.0, first_step=4.0))
    assert run.ended - stop.at < 10
    outcome = outcome_of(run)
    # On a busy machine its engine may stand before the signal comes.
    assert (outcome.kind, outcome.rank) == ("hang", rank)
    assert outcome.sentence == f"rank {rank} is stopped (SIGSTOP) and the trial was silent for 4 s in {outcome.moment}"
    assert not any(map(is_alive, stop.processes))


def test_a_rank_that_ignores_sigterm_ends_all_the_same(bench: FaultyBench, tmp_path: Path) -> None:
    steps_after: list[float] = []

    def ask_and_then_cancel(rank: int, event: Event) -> None:
        deaf(rank, event)
        steps_on = bool(deaf.at and bench.provoke.happened()) and a_step_of(1)(rank, event)
        if steps_on and len(steps_after) < 5:  # what it writes after the fifth may be read when it is dead
            bench.rank(1).terminate()
            steps_after.append(now())
            if len(steps_after) == 5:
                bench.cancel()

    deaf = Once(bench, a_step_of(1), lambda: bench.provoke(bench.rank(1), "ignore_sigterm"))
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), ask_and_then_cancel)
    assert len(steps_after) == 5  # it worked on through four of the requests to end
    assert run.exits[1] == -signal.SIGKILL
    assert run.ended - steps_after[4] < 2
    assert not any(map(is_alive, deaf.processes))


@pytest.mark.parametrize("fault", ["hold_on_as_a_fork", "hold_on_in_a_session"])
@pytest.mark.parametrize("ending", ["rank killed", "rank done"])
def test_what_a_rank_started_ends_with_the_trial(bench: FaultyBench, tmp_path: Path, fault: str, ending: str) -> None:
    holders: list[psutil.Process] = []

    def look(rank: int, event: Event) -> None:
        provoke(rank, event)
        if not holders and bench.provoke.happened():
            ranks = {bench.rank(each).pid for each in range(WORLD_SIZE)}
            holders.extend(process for process in bench.ranks() if process.pid not in ranks)
            assert holders, "the grandchild is to be seen alive"
            if ending == "rank killed":
                bench.rank(1).kill()

    provoke = Once(bench, a_step_of(1), lambda: bench.provoke(bench.rank(1), fault))
    steps = ENDLESS if ending == "rank killed" else StepPolicy(minimum=40, maximum=40)
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=steps), look)
    assert bench.provoke.happened()
    assert holders
    assert not any(map(is_alive, [*provoke.processes, *holders]))
    kinds = [record.outcome.kind for record in records_of(run)]
    assert kinds == (["crash"] if ending == "rank killed" else ["fits"])


@RANKS
def test_a_rank_that_leaves_with_status_zero_before_its_report_is_complete_is_a_crash(
    bench: FaultyBench, tmp_path: Path, rank: int
) -> None:
    leave = Once(bench, a_step_of(rank), lambda: bench.provoke(bench.rank(rank), "leave_with_status_zero"))
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), leave)
    assert run.exits[rank] == 0
    assert not any(isinstance(event, DoneEvent) for event in run.events[rank])
    outcome = outcome_of(run)
    assert (outcome.kind, outcome.rank) == ("crash", rank)
    assert "exited with status 0" in outcome.sentence
    assert not any(map(is_alive, leave.processes))


@RANKS
def test_one_rank_out_of_memory_while_its_peer_waits_is_named_and_all_are_gone_within_two_seconds(
    bench: FaultyBench, tmp_path: Path, rank: int
) -> None:
    """The limit of one rank alone is lowered from outside, between a candidate that fits it and one that does not."""

    def has_measured(heard: int, event: Event) -> bool:
        return heard == rank and isinstance(event, MeasuredEvent)

    def take_memory_away() -> None:
        resource.prlimit(bench.rank(rank).pid, resource.RLIMIT_DATA, (32 << 20, resource.RLIM_INFINITY))

    shrink = Once(bench, has_measured, take_memory_away)
    run = bench.run(tiny_trial(tmp_path / "0001", 1, 128, memory_limit=ROOM_BYTES), shrink)
    failures = [(heard, event) for heard, events in enumerate(run.events) for event in events if is_cause(event)]
    assert [heard for heard, _ in failures] == [rank]  # the other one had no error of its own
    outcome = outcome_of(run)
    assert (outcome.kind, outcome.rank) == ("gpu_oom", rank)
    assert f"rank {rank} reached its memory limit" in outcome.sentence
    assert [record.outcome.kind for record in records_of(run)] == ["fits", "gpu_oom"]
    assert run.ended - failures[0][1].t < 2
    assert not any(map(is_alive, shrink.processes))


def is_cause(event: Event) -> bool:
    return isinstance(event, FailedEvent) and not event.consequence


# What ranks print is theirs alone


def test_a_rank_that_prints_without_end_keeps_a_short_log_and_its_measurement(
    bench: FaultyBench, tmp_path: Path
) -> None:
    log = tmp_path / "0001" / "rank1.log"
    printing = Once(bench, a_step_of(1), lambda: bench.provoke(bench.rank(1), "print_a_lot"))
    run = bench.run(tiny_trial(log.parent, 1, steps=StepPolicy(minimum=20, maximum=20)), printing)
    assert int(bench.provoke.happened()[0]) >= 96 * MIB
    assert [record.outcome.kind for record in records_of(run)] == ["fits"]
    assert b"\x1b[2J" in log.read_bytes()
    assert log.stat().st_size <= 17 * MIB < 96 * MIB


def test_a_hostile_message_reaches_the_terminal_as_text_only(
    bench: FaultyBench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = 1
    fail = Once(bench, a_step_of(rank), lambda: bench.provoke(bench.rank(rank), "raise_hostile_text"))
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), fail)
    (failure,) = [event for event in run.events[rank] if isinstance(event, FailedEvent)]
    assert "\x1b]0;owned\x07" in failure.message
    outcome = outcome_of(run)
    assert (outcome.kind, outcome.rank) == ("crash", rank)
    capfd.readouterr()
    plain_lines(TrialEnds(run, records_of(run)))
    shown = capfd.readouterr().err
    assert r"RuntimeError: \x1b[31m\x1b]0;owned\x07[/bold]" in shown
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert shown.count("\n") == 2  # the outcome and the times: a message adds no line
