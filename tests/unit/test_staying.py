"""What ends badly in ranks that ran another trial before is believed only if the earlier trial cannot be the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from helpers import WORLD_SIZE, as_a_rank_sees, bundled_workload, make_candidate, tiny_trial
from helpers.values import machine_with

from ladder.events.outcome import OutcomeKind
from ladder.events.protocol import DoneEvent, Event, FailedEvent, MeasuredEvent, ScriptSpec, TrialSpec
from ladder.events.step_policy import StepPolicy
from ladder.events.trial_run import DeviceUse, Ending, TrialRun
from ladder.launch.staying import is_doubtful, set_aside
from ladder.tuning.trial_request import trial_spec
from ladder.units import GIB, MIB

Device = Literal["cuda", "cpu"]


def ended(*last: Event, device: Device = "cuda", **facts: Any) -> TrialRun:
    spec = tiny_trial(Path("/run/trials/0002"), 1, memory_limit=10 * GIB).model_copy(update={"device": device})
    return TrialRun(spec=spec, events=[[event] for event in last], **facts)


def failed(kind: OutcomeKind = "gpu_oom", lacking: int | None = GIB, *, consequence: bool = False) -> FailedEvent:
    asked, free = (None, None) if lacking is None else (lacking + MIB, MIB)
    return FailedEvent(
        t=1.0,
        candidate=None,
        outcome=kind,
        moment="backward",
        message="",
        bytes_asked=asked,
        bytes_free=free,
        consequence=consequence,
    )


DONE = DoneEvent(t=1.0)
FOLLOWS = failed("crash", None, consequence=True)


@pytest.mark.parametrize(
    ("run", "doubtful"),
    [
        (ended(DONE, DONE), False),
        (ended(failed(), FOLLOWS), False),
        (ended(failed(lacking=205 * MIB), FOLLOWS), False),  # 2 % of the limit are 204.8 MiB
        (ended(failed(lacking=204 * MIB), FOLLOWS), True),
        (ended(failed(lacking=-MIB // 2), FOLLOWS), True),
        (ended(failed(lacking=None), FOLLOWS), True),
        (ended(failed(), failed("crash")), True),
        (ended(failed(), FOLLOWS, device="cpu"), True),
        (ended(failed("crash", None), FOLLOWS), True),
        (ended(failed("host_oom"), FOLLOWS), True),
        (ended(DONE, FOLLOWS), True),
        (TrialRun(spec=ended(DONE).spec, events=[[], []]), True),
        (ended(failed("crash"), FOLLOWS, stop=Ending(kind="hang", sentence="")), True),
        (ended(failed("crash"), FOLLOWS, stop=Ending(kind="lost_server", sentence="")), True),
        (ended(failed("crash"), FOLLOWS, stop=Ending(kind="cancelled", sentence="")), False),
        (ended(failed("crash"), FOLLOWS, stop=Ending(kind="environment", sentence="")), False),
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
    facts: dict[str, Any] = {"peak_device": GIB, "alloc_retries": 0, **changes}
    seen = MeasuredEvent(
        t=1.0,
        candidate="zero2 ckpt=on mb=1",
        began=0.0,
        accumulate_seconds=[],
        boundary_seconds=[1.0],
        skipped_steps=0,
        peak_allocated=GIB,
        peak_reserved=GIB,
        outside_torch=0,
        peak_host=GIB,
        losses=[],
        **facts,
    )
    run = ended(DONE, DONE)
    run.events[0].insert(0, seen)
    run.device_use = {seen.candidate: DeviceUse(utilisation=None, watts=None, sm_clock_mhz=None, peak_bytes=used)}
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
    assert (spec.model_copy(update=changes).processes == spec.processes) == alike


@pytest.mark.parametrize(
    ("device", "changes", "may"),
    [
        ("cuda", {}, True),
        ("cuda", {"probe": True}, True),
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
        ("zero2", "cuda", {}, 0.0),
        ("fsdp2+cpu", "cuda", {}, 1.0),
    ],
)
def test_only_where_a_gpu_rests_during_the_optimizer_do_timed_steps_accumulate_longer(
    rung: str, device: str, changes: dict[str, Any], seconds: float
) -> None:
    assert asked_for(rung, device, **changes).steps.sustained_seconds == seconds


def asked_for(rung: str, device: str, **changes: Any) -> TrialSpec:
    candidate = make_candidate(rung)
    return trial_spec(
        "0001",
        Path("/run/trials/0001"),
        bundled_workload(),
        machine_with(2, device),
        candidate.engine,
        {},
        [as_a_rank_sees(candidate)],
        steps=StepPolicy(),
        **changes,
    )
