"""Ranks stay after a trial that ended well, and run the next one; nothing that they kept decides anything."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import TINY_CONFIG, WORLD_SIZE, Bench, is_alive, tiny_trial, wait_until

from ladder.events.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, StepEvent, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import TrialRun
from ladder.trial.backends import backend_of
from ladder.units import MIB

SMALL = TINY_CONFIG | {"vocab_size": 16000, "hidden_size": 256, "intermediate_size": 1024}
"""Its engines take several times what the libraries keep after one."""
TOO_MUCH = 512
"""A micro-batch that `LIMIT` has no room for: its logits alone take as much."""
LIMIT = 1000 * MIB
THREE_STEPS = StepPolicy(minimum=3, maximum=3, target_spread=0)


@pytest.fixture
def bench(warm_bench: Bench, tmp_path: Path) -> Iterator[Bench]:
    """In which no rank stays from an earlier test, nor for a later one."""
    assert warm_bench.ranks() == []
    yield warm_bench
    if warm_bench.ranks():  # they end before a trial of others
        warm_bench.run(tiny_trial(tmp_path / "after", 1))
    assert warm_bench.ranks() == []


def trial(folder: Path, rung: str, *micro_batches: int, **changes: Any) -> TrialSpec:
    spec = tiny_trial(folder, *(micro_batches or (1,)), rung=rung)
    told: dict[str, Any] = {"model_config_json": SMALL, "may_stay": True, "steps": THREE_STEPS}
    return replace(spec, **(told | changes))


def without_memory(folder: Path, rung: str) -> TrialSpec:
    return trial(folder, rung, 1, TOO_MUCH, memory_limit=LIMIT)


def assert_out_of_memory(run: TrialRun) -> None:
    causes = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    assert {event.outcome for event in causes if not event.consequence} == {"gpu_oom"}


def pids(bench: Bench) -> set[int]:
    return {rank.pid for rank in bench.ranks()}


def measured(run: TrialRun) -> MeasuredEvent:
    assert all(isinstance(events[-1], DoneEvent) for events in run.events), run.events
    (found,) = [event for event in run.events[0] if isinstance(event, MeasuredEvent)]
    return found


def test_another_engine_runs_in_the_same_processes_and_is_measured_as_in_new_ones(bench: Bench, tmp_path: Path) -> None:
    first = bench.run(trial(tmp_path / "0001", "zero2"))
    ranks = pids(bench)
    assert first.stays
    assert len(ranks) == WORLD_SIZE
    second = bench.run(trial(tmp_path / "0002", "zero1"))
    assert pids(bench) == ranks
    assert "this process ran trial 0001 before" in (tmp_path / "0002" / "rank1.log").read_text()
    alone = bench.run(trial(tmp_path / "0003", "zero1", may_stay=False))
    assert pids(bench) == set()
    assert measured(second).losses == measured(alone).losses
    assert measured(second).peak_device == pytest.approx(measured(alone).peak_device, rel=0.25)
    assert not (tmp_path / "0002" / "rank0-before.jsonl").exists()


def test_ranks_stay_after_engines_that_leave_nothing_behind(tmp_path: Path) -> None:
    rungs = ["zero0", "zero1", "zero2", "zero3", "zero1+opt-cpu", "zero2+opt-cpu", "zero3+param-cpu", "ddp", "fsdp2"]
    specs = {rung: trial(tmp_path / "0001", rung) for rung in rungs}
    followed = [rung for rung, spec in specs.items() if backend_of(spec).can_be_followed(spec)]
    assert followed == ["zero0", "zero1", "zero2"]
    on_host = replace(specs["zero2"].candidates[0], offload_activations=True)
    pinned = replace(specs["zero2"], candidates=(on_host,))
    assert not backend_of(pinned).can_be_followed(pinned)


def test_ranks_of_an_engine_that_leaves_something_behind_end(bench: Bench, tmp_path: Path) -> None:
    run = bench.run(trial(tmp_path / "0001", "zero3"))
    measured(run)
    assert not run.stays
    assert run.exits == dict.fromkeys(range(WORLD_SIZE), 0)
    assert bench.ranks() == []


def test_a_proof_and_an_engine_with_another_environment_get_new_processes(bench: Bench, tmp_path: Path) -> None:
    bench.run(trial(tmp_path / "0001", "zero2"))
    stayed = pids(bench)
    measured(bench.run(trial(tmp_path / "0002", "zero2", environment={"LADDER_TEST": "1"})))
    others = pids(bench)
    assert others
    assert not others & stayed
    seen: set[int] = set()
    measured(
        bench.run(
            trial(tmp_path / "0003", "zero2", proof=True, may_stay=False), lambda rank, event: seen.update(pids(bench))
        )
    )
    assert not seen & others
    assert bench.ranks() == []


def test_what_fails_in_ranks_that_stayed_is_tried_again_in_new_ones(bench: Bench, tmp_path: Path) -> None:
    bench.run(trial(tmp_path / "0001", "zero2"))
    stayed, seen = pids(bench), set[int]()
    run = bench.run(without_memory(tmp_path / "0002", "zero1"), lambda rank, event: seen.update(pids(bench)))
    assert_out_of_memory(run)
    assert seen - stayed  # it was judged by new processes
    before = [(tmp_path / "0002" / f"rank{rank}-before.jsonl").read_text() for rank in range(WORLD_SIZE)]
    assert any('"failed"' in events for events in before)
    assert bench.ranks() == []


def test_a_rank_that_ends_while_it_waits_costs_time_and_no_result(bench: Bench, tmp_path: Path) -> None:
    bench.run(trial(tmp_path / "0001", "zero2"))
    victim, *others = bench.ranks()
    victim.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(victim))
    run = bench.run(trial(tmp_path / "0002", "zero1"))
    measured(run)
    assert not {rank.pid for rank in others} & pids(bench)


def test_ranks_that_all_ended_while_they_waited_leave_a_server_that_goes_on(bench: Bench, tmp_path: Path) -> None:
    bench.run(trial(tmp_path / "0001", "zero2"))
    server, ranks = bench.server(), bench.ranks()
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)))
    measured(bench.run(trial(tmp_path / "0002", "zero1", may_stay=False)))
    assert bench.server() == server


def test_a_rank_killed_in_its_second_trial_is_judged_by_a_third(bench: Bench, tmp_path: Path) -> None:
    bench.run(trial(tmp_path / "0001", "zero2"))
    victims = [bench.ranks()[0]]

    def kill(rank: int, event: Event) -> None:
        if isinstance(event, StepEvent) and victims:
            victims.pop().send_signal(signal.SIGKILL)

    run = bench.run(trial(tmp_path / "0002", "zero1"), kill)
    assert victims == []
    measured(run)
    assert run.stop is None


def test_ranks_that_wait_end_with_their_server(local_bench: Callable[..., Bench], tmp_path: Path) -> None:
    bench = local_bench()
    try:
        assert bench.run(trial(tmp_path / "0001", "zero2")).stays
        ranks: list[psutil.Process] = bench.ranks()
        bench.server().send_signal(signal.SIGKILL)
        wait_until(lambda: not any(is_alive(rank) for rank in ranks), seconds=5)
        measured(bench.run(trial(tmp_path / "0002", "zero1")))  # with a new server
    finally:
        bench.launcher.close()
    assert bench.processes() == []


def test_a_cancelled_trial_leaves_no_rank_that_waits(bench: Bench, tmp_path: Path) -> None:
    bench.run(trial(tmp_path / "0001", "zero2"))

    def cancel(rank: int, event: Event) -> None:
        if isinstance(event, StepEvent):
            bench.cancel()

    run = bench.run(trial(tmp_path / "0002", "zero1"), cancel)
    assert run.stop is not None
    assert run.stop.kind == "cancelled"
    assert bench.ranks() == []
    assert not (tmp_path / "0002" / "rank0-before.jsonl").exists()
