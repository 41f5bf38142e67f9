"""What ends badly in ranks that ran another trial before is believed only if the earlier trial cannot be the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers import WORLD_SIZE, as_a_rank_sees, bundled_workload, make_candidate, tiny_trial
from helpers.events import measured_event
from helpers.values import machine_with

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.events.outcome import OutcomeKind
from ladder.events.protocol import DoneEvent, Event, FailedEvent, ScriptSpec, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import DeviceUse, Ending, TrialRun
from ladder.launch.staying import is_doubtful, set_aside
from ladder.machine.nvme import needed_bytes, step_patience
from ladder.tuning.trial_request import trial_deadlines, trial_spec
from ladder.units import GIB, MIB

Device = Literal["cuda", "cpu"]


def ended(*last: Event, device: Device = "cuda", **facts: Any) -> TrialRun:
    spec = replace(tiny_trial(Path("/run/trials/0002"), 1, memory_limit=10 * GIB), device=device)
    return TrialRun(spec=spec, events=[[event] for event in last], **facts)


def failed(kind: OutcomeKind = "gpu_oom", lacking: int | None = GIB, *, consequence: bool = False) -> FailedEvent:
    asked, free = (None, None) if lacking is None else (lacking + MIB, MIB)
    event = FailedEvent(t=1.0, candidate=None, outcome=kind, moment="backward", message="", consequence=consequence)
    return replace(event, bytes_asked=asked, bytes_free=free)


DONE = DoneEvent(t=1.0)
FOLLOWS = failed("crash", None, consequence=True)


@pytest.mark.parametrize(
    ("run", "doubtful"),
    [
        (ended(DONE, DONE), False),
        (ended(failed(), FOLLOWS), False),
        (ended(failed(lacking=205 * MIB), FOLLOWS), False),  # 2 % of the limit are 204.8 MiB
        (ended(failed(lacking=204 * MIB), FOLLOWS), True),
        (ended(failed(lacking=None), FOLLOWS), True),
        (ended(failed(), failed("crash")), True),
        (ended(failed(), FOLLOWS, device="cpu"), True),
        (ended(failed("crash", None), FOLLOWS), True),
        (ended(DONE, FOLLOWS), True),
        (TrialRun(spec=ended(DONE).spec, events=[[], []]), True),
        (ended(failed("crash"), FOLLOWS, stop=Ending(kind="hang", sentence="")), True),
        (ended(failed("crash"), FOLLOWS, stop=Ending(kind="cancelled", sentence="")), False),
    ],
)
def test_a_bad_end_is_doubtful_unless_far_too_much_memory_is_missing(run: TrialRun, doubtful: bool) -> None:
    assert is_doubtful(run) == doubtful


@pytest.mark.parametrize(
    ("changes", "used", "doubtful"),
    [
        ({}, 0, False),
        ({"peak_device": 10 * GIB}, 10 * GIB, False),
        ({"peak_device": 10 * GIB + 1}, 0, True),
        ({}, 10 * GIB + 1, True),
        ({"alloc_retries": 1}, 0, True),
    ],
)
def test_what_only_just_fits_is_measured_again_with_all_the_room_there_is(
    changes: dict[str, int], used: int, doubtful: bool
) -> None:
    seen = measured_event("zero2 ckpt=on mb=1", **{"peak_device": GIB, **changes})
    run = ended(DONE, DONE)
    run.events[0].insert(0, seen)
    run.device_use = {seen.candidate: DeviceUse(utilisation=None, watts=None, peak_bytes=used)}
    assert is_doubtful(run) == doubtful


def test_what_ranks_reported_before_a_repetition_is_kept_under_another_name(tmp_path: Path) -> None:
    run = TrialRun(spec=tiny_trial(tmp_path, 1), events=[])
    (tmp_path / "rank0.jsonl").write_text("{}\n")
    (tmp_path / "rank0.log").write_text("printed\n")
    set_aside(run)  # rank 1 has reported nothing
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0-before.jsonl", "rank0.log"]
    assert len(run.spec.local_ranks) == WORLD_SIZE


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"trial": "0009", "memory_limit": GIB, "seed": 1, "probe": True, "parity": True}, True),
        ({"environment": {"NAME": "value"}}, False),
        ({"rank_modules": ("ladder.trial.techniques.liger",)}, False),
        ({"backend_module": "ladder.trial.backends.plain"}, False),
        ({"world_size": 1}, False),
        ({"gpu_uuids": ("GPU-1", "GPU-2")}, False),
    ],
)
def test_trials_share_processes_only_where_these_are_made_for_the_same(changes: dict[str, Any], alike: bool) -> None:
    spec = tiny_trial(Path("/run/trials/0002"), 1)
    assert (replace(spec, **changes).processes == spec.processes) == alike


@pytest.mark.parametrize(
    ("device", "changes", "may"),
    [
        ("cuda", {}, True),
        ("cuda", {"proof": True}, False),
        ("cuda", {"script": ScriptSpec(command=("train.py",))}, False),
        ("cpu", {}, False),
    ],
)
def test_only_trials_of_random_weights_on_gpus_may_share_processes(
    device: str, changes: dict[str, Any], may: bool
) -> None:
    assert asked_for("zero2", device, **changes).may_stay is may


@pytest.mark.parametrize(
    ("rung", "device", "changes", "seconds"),
    [
        ("zero1+opt-cpu", "cuda", {}, 1.0),
        ("zero1+opt-cpu", "cuda", {"proof": True}, 10.0),
        ("zero2", "cuda", {"proof": True}, 0.0),
        ("zero1+opt-cpu", "cuda", {"probe": True}, 0.0),
        ("zero1+opt-cpu", "cpu", {}, 0.0),
        ("fsdp2+cpu", "cuda", {}, 1.0),
    ],
)
def test_only_where_a_gpu_rests_during_the_optimizer_do_timed_steps_accumulate_longer(
    rung: str, device: str, changes: dict[str, Any], seconds: float
) -> None:
    assert asked_for(rung, device, **changes).steps.sustained_seconds == seconds


def asked_for(rung: str, device: str, **changes: Any) -> TrialSpec:
    candidate, machine, folder = make_candidate(rung), machine_with(2, device), Path("/run/trials/0001")
    seen = [as_a_rank_sees(candidate)]
    workload, steps = bundled_workload(), StepPolicy()
    return trial_spec(folder.name, folder, workload, machine, candidate.engine, {}, seen, steps=steps, **changes)


# How long a trial waits for its ranks and for a drive: the larger the model, the longer.

SMALL, SEVEN_BILLION = bundled_workload("tiny-llama"), bundled_workload("llama-2-7b")
ON_HOST, ON_DISK = (Engine(RUNGS_BY_NAME[name]) for name in ("zero3+opt-cpu", "zero3+param-nvme+opt-nvme"))
SLOW_DRIVE = 5e8
"""Bytes a second."""


@pytest.mark.parametrize("phase", ["model", "engine", "first_step"])
def test_a_large_model_has_minutes_more_to_be_laid_out(phase: str) -> None:
    small, large = (getattr(trial_deadlines(workload, ON_HOST), phase) for workload in (SMALL, SEVEN_BILLION))
    assert large - small > 60


@pytest.mark.parametrize("phase", ["model", "engine", "first_step", "step", "total"])
def test_a_drive_is_waited_for_longer_than_the_host(phase: str) -> None:
    on_host, on_disk = (getattr(trial_deadlines(SEVEN_BILLION, engine), phase) for engine in (ON_HOST, ON_DISK))
    assert on_disk > on_host


@pytest.mark.parametrize("model", ["tiny-llama", "llama-2-7b", "llama-2-13b"])
def test_a_slow_drive_is_waited_for_while_it_moves_all_states_of_a_step(model: str) -> None:
    workload = bundled_workload(model)
    states, master, gradients = 2 * 8, 2 * 4, 6  # bytes a parameter: states and master are read and written
    moved = (states + master + gradients) * workload.model.num_parameters
    assert step_patience(workload) > moved / SLOW_DRIVE


def test_sgd_keeps_the_master_weights_on_the_drive_and_no_moments() -> None:
    rung = RUNGS_BY_NAME["zero3+opt-nvme"]
    sgd, adam = (needed_bytes(rung, bundled_workload("llama-2-7b", optimizer=name)) for name in ("sgd", "adam"))
    assert sgd == 4 * SEVEN_BILLION.model.num_parameters
    assert adam == 3 * sgd
