"""Turns a trial's events into records: which candidates fit, which one ended the trial, and why."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Literal

from ladder.candidates import Candidate
from ladder.events.outcome import Alike, Measurement, Outcome, Purpose, Record
from ladder.events.promise import window_speeds
from ladder.events.protocol import DoneEvent, FailedEvent, MeasuredEvent, PhaseEvent, TrialSpec
from ladder.events.step_policy import relative_spread
from ladder.events.trial_run import DeviceUse, TrialRun
from ladder.text import shown
from ladder.units import counted, format_bytes
from ladder.workload.workload import Workload

_WAITING = 0.1
"""Of a step, from which on the wait for a data loader is worth a warning. Chosen: less is hardly worth the trouble."""
_LIKE_A_TRAINING = 0.1
"""The power of the GPUs is told if a trial's steps have at most so much more of the optimizer, by time, than the
training's. Chosen: a GPU rests while an optimizer on the host works (measured with Llama-3.2-1B on an H200: a mean of
256 W in a trial of one, 669 W with the optimizer on the GPU; benchmarks/results/compare, GPU acfa585e)."""

_FROM_OUTSIDE = (-signal.SIGTERM, -signal.SIGKILL)
"""What people, schedulers and the kernel end processes with; a fault of a program's own raises others."""


def judge(run: TrialRun, workload: Workload, candidates: Sequence[Candidate]) -> list[Record]:
    """Records of the candidates that every rank measured, and of the candidate that ended the trial, if one did."""
    by_key = {candidate.key: candidate for candidate in candidates}
    purpose: Purpose = "proof" if run.spec.proof else "probe" if run.spec.probe else "measure"
    records, by_all = [], _measured_by_all(run)
    for key, events in by_all.items():
        accumulation = by_key[key].accumulation
        measurement = _measurement(events, run.device_use.get(key), accumulation)
        if not _is_like_training(measurement, events[0].micro_steps or accumulation, accumulation):
            measurement = replace(measurement, watts=None)
        if measurement.peak_device > run.spec.memory_limit:
            records.append(_over_the_limit(key, measurement, run, purpose))
            continue
        record = Record(
            candidate_key=key,
            trial=run.spec.trial,
            purpose=purpose,
            outcome=Outcome(kind="fits"),
            measurement=measurement,
        )
        if not run.spec.probe:
            speed = workload.tokens_per_step / measurement.step_seconds(accumulation)
            warnings = _warnings(measurement, run.spec.memory_limit)
            record = replace(record, tokens_per_second=speed, warnings=warnings)
        records.append(record)
    if (outcome := ending_of(run)) is not None:
        passed = by_all.keys() | _left_out(run.spec, by_all)
        culprit = next((candidate.key for candidate in run.spec.candidates if candidate.key not in passed), None)
        if culprit is None:  # everything was measured and then the teardown failed, which is no candidate's fault
            return records
        records.append(Record(candidate_key=culprit, trial=run.spec.trial, purpose=purpose, outcome=outcome))
    return records


def ending_of(run: TrialRun) -> Outcome | None:
    """What ended the trial, with the node of its rank where there are several; None for a clean end."""
    ending = _ending(run)
    if ending is None or ending.rank is None or not run.nodes:
        return ending
    return replace(ending, sentence=f"{ending.sentence} (node {run.nodes[ending.rank]})")


def _left_out(spec: TrialSpec, by_all: Mapping[str, Sequence[MeasuredEvent]]) -> set[str]:
    """The candidates that the ranks skipped because the first one was too slow."""
    first = spec.candidates[0]
    if first.key not in by_all:
        return set()
    seconds = by_all[first.key][0].step_seconds(first.accumulation)
    return {each.key for each in spec.candidates if each.is_left_out(seconds)}


def _over_the_limit(key: str, measurement: Measurement, run: TrialRun, purpose: Purpose) -> Record:
    """An OOM record for a candidate that only ran because the GPU has more memory than the limit."""
    held, limit = format_bytes(measurement.peak_device), format_bytes(run.spec.memory_limit)
    outcome = Outcome(
        kind="gpu_oom",
        moment="measure",
        sentence=f"a rank used {held} in all, more than the limit of {limit}",
        bytes_asked=measurement.peak_device - run.spec.memory_limit,
        bytes_free=0,
    )
    return Record(candidate_key=key, trial=run.spec.trial, purpose=purpose, outcome=outcome)


def _measured_by_all(run: TrialRun) -> dict[str, list[MeasuredEvent]]:
    by_rank = [
        {event.candidate: event for event in events if isinstance(event, MeasuredEvent)} for events in run.events
    ]
    shared = [key for key in by_rank[0] if all(key in rank for rank in by_rank)] if by_rank else []
    return {key: [rank[key] for rank in by_rank] for key in shared}


def _is_like_training(measurement: Measurement, made: int, accumulation: int) -> bool:
    """Whether the optimizer has about the share of time in steps of `made` micro-steps that it has in a training's."""
    if measurement.accumulate_seconds is None:
        return True
    extra = max(0.0, measurement.boundary_seconds - measurement.accumulate_seconds)
    more = extra / measurement.step_seconds(made) - extra / measurement.step_seconds(accumulation)
    return more <= _LIKE_A_TRAINING


def _measurement(events: Sequence[MeasuredEvent], use: DeviceUse | None, accumulation: int) -> Measurement:
    first = events[0]
    steps = first.steps(accumulation)
    fullest = max(events, key=lambda event: event.peak_device)
    return Measurement(
        accumulate_seconds=statistics.median(first.accumulate_seconds) if first.accumulate_seconds else None,
        boundary_seconds=statistics.median(first.boundary_seconds),
        spread=relative_spread(steps),
        window_speeds=window_speeds(steps, first.step_seconds(accumulation)),
        num_steps=len(first.boundary_seconds),
        peak_allocated=max(event.peak_allocated for event in events),
        peak_reserved=max(event.peak_reserved for event in events),
        peak_device=max(fullest.peak_device, (use.peak_bytes or 0) if use else 0),
        outside_torch=fullest.outside_torch,
        peak_host=sum(event.peak_host for event in events),
        held_host=sum(event.held_host or event.peak_host for event in events),
        alloc_retries=max(event.alloc_retries for event in events),
        others=max((event.others for event in events if event.others is not None), default=None),
        others_on_gpu=use.others if use else None,
        losses=tuple(first.losses),
        utilisation=use.utilisation if use else None,
        watts=use.watts if use else None,
        **{each.name: getattr(first, each.name) for each in fields(Alike)},
        matrix_flops=min((event.matrix_flops for event in events if event.matrix_flops), default=None),
    )


def _warnings(measurement: Measurement, limit: int) -> tuple[str, ...]:
    warnings = []
    if measurement.alloc_retries:
        warnings.append(f"the allocator emptied its cache {counted(measurement.alloc_retries, 'time')} while timing")
    if measurement.skipped_steps:
        warnings.append(f"{measurement.skipped_steps} optimizer steps were skipped because gradients overflowed")
    if measurement.peak_device > 0.97 * limit:
        warnings.append(f"thin headroom: {1 - measurement.peak_device / limit:.1%} of memory left at the peak")
    if measurement.compile_seconds is not None:
        warnings.append(f"compiling took {measurement.compile_seconds:.0f} s of its first step, which is not counted")
    if measurement.disturbance:
        warnings.append(f"other programs took {measurement.disturbance:.0%} of {measurement.disturbed} meanwhile")
    if (measurement.loader_share or 0.0) > _WAITING:
        warnings.append(
            f"{measurement.loader_share:.0%} of a step waits for the script's data loader, which more of its workers "
            "may shorten"
        )
    return tuple(warnings)


def _ending(run: TrialRun) -> Outcome | None:
    """The earliest cause over all ranks; errors caused by another rank's failure count only if there is no other."""
    if run.stop is not None and run.stop.kind == "cancelled":
        return Outcome(kind="cancelled", sentence=run.stop.sentence)
    failures = [
        (rank, event) for rank, events in enumerate(run.events) for event in events if isinstance(event, FailedEvent)
    ]
    causes = sorted((pair for pair in failures if not pair[1].consequence), key=lambda pair: pair[1].t)
    if causes:
        return _reported(*causes[0], run.spec.device)
    if (death := _silent_death(run)) is not None:
        return death
    if run.stop is not None:
        kinds: dict[str, Literal["hang", "host_oom"]] = {"hang": "hang", "host_oom": "host_oom"}
        return Outcome(
            kind=kinds.get(run.stop.kind, "crash"),
            sentence=run.stop.sentence,
            rank=run.stop.rank,
            moment=_last_phase(run, run.stop.rank),
        )
    if failures:
        return _reported(*min(failures, key=lambda pair: pair[1].t), run.spec.device)
    return None


def _reported(rank: int, event: FailedEvent, device: str) -> Outcome:
    own = "GPU memory" if device == "cuda" else "its memory limit"
    resource = {"gpu_oom": own, "host_oom": "host memory", "pinned_oom": "pinned host memory"}
    if event.outcome in resource:
        verb = "ran out of" if device == "cuda" or event.outcome != "gpu_oom" else "reached"
        sentence = f"rank {rank} {verb} {resource[event.outcome]} in {event.moment}"
        if event.bytes_asked is not None:
            sentence += f": asked for {format_bytes(event.bytes_asked)}"
            sentence += f" with {format_bytes(event.bytes_free)} free" if event.bytes_free is not None else ""
            sentence += ", but not in one piece" if event.bytes_asked <= (event.bytes_free or 0) else ""
        elif "OverLimitError" in event.message:
            sentence += f": {event.message.partition(': ')[2]}"
    else:
        first_line = next(iter(event.message.splitlines()), "")
        sentence = f"rank {rank} failed in {event.moment}: {first_line[:300]}"
    return Outcome(
        kind=event.outcome,
        sentence=shown(sentence),
        rank=rank,
        moment=event.moment,
        bytes_asked=event.bytes_asked,
        bytes_free=event.bytes_free,
    )


def _silent_death(run: TrialRun) -> Outcome | None:
    """The outcome of a rank that ended without a report. A SIGKILL is an OOM only if the kernel counted one."""
    for rank, status in run.exits.items():
        if rank in run.killed or any(isinstance(event, DoneEvent | FailedEvent) for event in run.events[rank]):
            continue
        moment = _last_phase(run, rank)
        kind: Literal["host_oom", "crash"] = "host_oom"
        if status == -signal.SIGKILL and run.oom_kills > 0:
            sentence = f"the kernel killed rank {rank} in {moment} because host memory ran out"
        elif status == -signal.SIGBUS:
            sentence = f"rank {rank} ran out of /dev/shm in {moment}"
        else:
            how = f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"
            kind, sentence = "crash", f"rank {rank} {how} in {moment} without a report"
        return Outcome(kind=kind, rank=rank, moment=moment, sentence=sentence)
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _last_phase(run: TrialRun, rank: int | None) -> str:
    events = run.events[rank or 0]
    return next((event.phase for event in reversed(events) if isinstance(event, PhaseEvent)), "process_group")


def trial_seconds(run: TrialRun) -> dict[str, float]:
    """The trial's seconds by phase, of the slowest rank in each; start-up and teardown included."""
    marks: dict[str, float] = {}
    seconds: dict[str, float] = {"start": max(0.0, run.started - run.requested)}
    for events in run.events:
        own: dict[str, float] = {}
        previous: tuple[str, float] | None = None
        for event in events:
            if previous is not None and isinstance(event, PhaseEvent | FailedEvent | DoneEvent):
                own[previous[0]] = own.get(previous[0], 0.0) + event.t - previous[1]
            if isinstance(event, PhaseEvent):
                previous = (event.phase, event.t)
            marks["last"] = max(marks.get("last", 0.0), event.t)
        for phase, value in own.items():
            seconds[phase] = max(seconds.get(phase, 0.0), value)
    seconds["teardown"] = seconds.get("teardown", 0.0) + max(0.0, run.ended - marks.get("last", run.ended))
    return seconds


def killed_by_somebody(run: TrialRun, records: Sequence[Record]) -> str:
    """What is said of a rank that SIGTERM or SIGKILL ended with no sign of memory; empty if that did not end the trial.

    It probably says nothing about the candidate.
    """
    end = records[-1].outcome if records else None
    if end is None or end.kind != "crash" or end.rank is None or end.rank in run.killed:
        return ""
    return end.sentence if run.exits.get(end.rank) in _FROM_OUTSIDE else ""


def false_start(run: TrialRun, records: Sequence[Record]) -> str:
    """Why the trial ended before its engine was created; empty if it did not. It then says nothing about the engine."""
    if run.stop is not None and run.stop.kind == "lost_server":
        return run.stop.sentence[:1].upper() + run.stop.sentence[1:]
    if run.stop is None and not records and not any(run.exits.values()):
        return "The trial ended without a result"
    endings = [record.outcome for record in records if record.outcome.kind in ("crash", "hang")]
    return next((f"No process group: {each.sentence}" for each in endings if each.moment == "process_group"), "")
