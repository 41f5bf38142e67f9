"""A SIGKILL is a host OOM only with the kernel's word for it, and what the host has no memory for is not even tried."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from faults.groups import own_group
from faults.provocation import ENDLESS, FaultyBench, Once, a_step_of, outcome_of
from helpers import is_alive, there, tiny_trial
from helpers.tunes import on_paper

from ladder.search.policy import STRATEGIES
from ladder.search.space import REFUSED
from ladder.tuning.tune_events import Note, TuneEvent
from ladder.units import GIB


def test_a_rank_that_the_kernel_kills_for_memory_is_a_host_oom(
    bench: FaultyBench, tmp_path: Path, small_group: Path
) -> None:
    bench.run(tiny_trial(tmp_path / "0001", 1))  # the server is up
    (small_group / "cgroup.procs").write_text(str(bench.server().pid))
    run = bench.run(tiny_trial(tmp_path / "0002", 256, memory_limit=1 << 40))
    assert "oom_kill 0" not in (small_group / "memory.oom_control").read_text()
    assert bench.server().is_running()  # the kernel chose a rank
    killed = {rank for rank, status in run.exits.items() if status == -signal.SIGKILL and rank not in run.killed}
    assert killed
    assert run.oom_kills >= 1
    outcome = outcome_of(run)
    assert outcome.kind == "host_oom"
    assert outcome.rank in killed
    assert "because host memory ran out" in outcome.sentence


@pytest.fixture
def fake_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files like the kernel's, v1 and v2, where our own processes are told to look."""
    root = tmp_path / "cgroup"
    monkeypatch.setenv("LADDER_CGROUP_ROOT", str(root))
    unified = root / own_group("") / "memory.events"
    classic = root / "memory" / own_group("memory") / "memory.oom_control"
    for file in (unified, classic):
        file.parent.mkdir(parents=True, exist_ok=True)
    unified.write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 7\noom_group_kill 0\n")
    classic.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n")
    return [unified, classic]


@pytest.mark.parametrize(("counts", "kind"), [(True, "host_oom"), (False, "crash")])
def test_the_same_sigkill_is_a_host_oom_only_if_the_kernels_count_moved(
    bench: FaultyBench, tmp_path: Path, fake_groups: list[Path], counts: bool, kind: str
) -> None:
    def kill() -> None:
        for file in fake_groups if counts else ():
            file.write_text(file.read_text().replace("oom_kill 7", "oom_kill 8"))
        bench.rank(1).kill()

    happen = Once(bench, a_step_of(1), kill)
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=ENDLESS), happen)
    assert run.exits[1] == -signal.SIGKILL
    assert run.oom_kills == int(counts)
    outcome = outcome_of(run)
    assert (outcome.kind, outcome.rank) == (kind, 1)
    assert ("memory" in outcome.sentence) == counts
    assert not any(map(is_alive, happen.processes))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rung_that_would_exceed_host_memory_is_refused_with_figures_and_never_tried(
    tmp_path: Path, strategy: str
) -> None:
    """7 billion parameters offloaded need 36 to 161 GiB of host memory: 32 GiB is too little for any such rung."""
    notes: list[TuneEvent] = []
    on_two: dict[str, Any] = {"machine": "a100-40", "gpus": 2, "host_memory": "32GiB", "backend": "deepspeed"}
    tuned = on_paper(tmp_path, "llama-2-7b", documented=True, strategy=strategy, callbacks=[notes.append], **on_two)
    records = tuned.output.result.records
    told = [event.text for event in notes if isinstance(event, Note)]
    offloaded = [record for record in records if "-cpu" in record.candidate_key]
    assert offloaded == [record for record in records if record.outcome.moment == REFUSED]
    for record in offloaded:
        assert record.outcome.kind == "host_oom"
        assert there(record.outcome.bytes_asked) > 32 * GIB
        assert "they may use 32.00 GiB" in record.outcome.sentence
        assert any(record.candidate_key in note and "refused" in note for note in told)
    if strategy != "auto":  # which need not ask for what it believes cannot fit
        assert offloaded
