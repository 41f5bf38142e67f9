"""Trials in ranks that ran another one before: when such a trial has to be repeated in new ones."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ladder.events.protocol import DoneEvent, FailedEvent, MeasuredEvent
from ladder.events.trial_run import TrialRun

_LEFTOVERS = 0.02
"""Of the memory limit: a lack of more is not due to what an earlier trial left. Derived: four times what ranks may keep
from it (`trial.gauge`)."""


def is_doubtful(run: TrialRun) -> bool:
    """Whether `run` might have ended in another way in new processes, which have a little more memory."""
    if run.stop is not None and run.stop.kind in ("cancelled", "environment"):
        return False
    is_complete = all(events and isinstance(events[-1], DoneEvent) for events in run.events)
    return _is_tight(run) if is_complete else not _lacks_much(run)


def _is_tight(run: TrialRun) -> bool:
    """Whether a little more room might have made a candidate faster, or fit."""
    seen = [event for events in run.events for event in events if isinstance(event, MeasuredEvent)]
    peaks = [event.peak_device for event in seen] + [use.peak_bytes or 0 for use in run.device_use.values()]
    return max(peaks, default=0) > run.spec.memory_limit or any(event.alloc_retries for event in seen)


def _lacks_much(run: TrialRun) -> bool:
    """On a GPU. On a CPU what was freed may still count."""
    if run.spec.device != "cuda":
        return False
    ends = [event for events in run.events for event in events if isinstance(event, FailedEvent)]
    causes = [event for event in ends if not event.consequence]
    lacking = [
        event.bytes_asked - event.bytes_free for event in causes if event.bytes_asked and event.bytes_free is not None
    ]
    is_memory = bool(causes) and all(event.outcome == "gpu_oom" for event in causes)
    return is_memory and max(lacking, default=0) > _LEFTOVERS * run.spec.memory_limit


def set_aside(run: TrialRun) -> None:
    """Keep what the ranks reported under other names, so that the trial can be repeated in its folder."""
    for rank in run.spec.local_ranks:
        file = Path(run.spec.folder) / f"rank{rank}.jsonl"
        with suppress(FileNotFoundError):
            file.replace(file.with_name(f"rank{rank}-before.jsonl"))
