"""A SIGKILL is a host OOM only with the kernel's word for it, and what the host has no memory for is not even tried."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults.groups import own_group
from faults.provocation import ENDLESS, FaultyBench, Once, a_step_of, outcome_of
from helpers import WORLD_SIZE, bundled_workload, is_alive, machine_with, tiny_trial
from helpers.tunes import tune_over

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.candidates import Rung
from ladder.events.protocol import FailedEvent, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.launch.base import Deadlines, Launcher, Listener
from ladder.search.policy import STRATEGIES
from ladder.search.space import ranking
from ladder.tuning.tune_events import Note, TuneEvent
from ladder.tuning.tuner import TuneResult
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


class NeverAskedTo(Launcher):
    """A GPU machine on which only rungs without offloading may be tried; each of their candidates runs out."""

    def __init__(self) -> None:
        self.tried: set[str] = set()

    def run(self, spec: TrialSpec, deadlines: Deadlines, listener: Listener) -> TrialRun:
        Path(spec.folder).mkdir(parents=True)
        self.tried |= {candidate.key for candidate in spec.candidates}
        key = spec.candidates[0].key
        oom = FailedEvent(t=1, candidate=key, outcome="gpu_oom", moment="forward", message="CUDA out of memory")
        return TrialRun(spec=spec, events=[[oom]] * WORLD_SIZE)

    def close(self) -> None:
        """There is nothing to end."""


def tune_a_7b_model(folder: Path, strategy: str, host_memory: int) -> tuple[TuneResult, set[str], list[str]]:
    """The result, the keys of what was tried, and the sentences that were told."""
    machine = replace(machine_with(WORLD_SIZE), memory_limit=40 * GIB, host_memory=host_memory, num_cores=16)
    rungs: list[Rung] = [rung for rung in RUNGS if "nvme" not in rung.devices]
    launcher, notes = NeverAskedTo(), list[str]()

    def tell(event: TuneEvent) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    workload = bundled_workload("meta-llama/Llama-2-7b-hf", seq_len=2048)
    options: dict[str, Any] = {"strategy": STRATEGIES[strategy], "machine": machine, "rungs": rungs, "tell": tell}
    return tune_over(launcher, folder, workload, **options), launcher.tried, notes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rung_that_would_exceed_host_memory_is_refused_with_figures_and_never_tried(
    tmp_path: Path, strategy: str
) -> None:
    """7 billion parameters offloaded need 36 to 161 GiB of host memory: 32 GiB is too little for any such rung."""
    result, tried, notes = tune_a_7b_model(tmp_path / "run", strategy, host_memory=32 * GIB)
    assert not any("-cpu" in key for key in tried)
    refused = [record for record in result.records if "refused" in record.outcome.sentence]
    assert all("-cpu" in record.candidate_key for record in refused)
    for record in refused:
        assert record.outcome.kind == "host_oom"
        assert record.outcome.bytes_asked is not None
        assert record.outcome.bytes_asked > 32 * GIB
        assert "they may use 32.00 GiB" in record.outcome.sentence
        assert any(record.candidate_key in note and "refused" in note for note in notes)
    if strategy != "auto":  # which need not ask for what it believes cannot fit
        assert refused
    assert ranking(result.records) == []


def test_with_enough_host_memory_the_same_rungs_are_tried(tmp_path: Path) -> None:
    result, tried, _ = tune_a_7b_model(tmp_path / "run", "exhaustive", host_memory=1024 * GIB)
    assert any("-cpu" in key for key in tried)
    assert not any("refused" in record.outcome.sentence for record in result.records)
