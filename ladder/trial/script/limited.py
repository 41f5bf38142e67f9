"""Holding the user's own training to the limit of its tune. It may run for days: nothing watches it meanwhile."""

from __future__ import annotations

import os
import resource

import torch

from ladder.events.protocol import ScriptSpec, TrialSpec
from ladder.trial.gauge import data_bytes, limit_data, limit_torch, tell_deepspeed


def limit_run(spec: TrialSpec, script: ScriptSpec) -> None:
    """Limit this process to what the tune allowed a rank, from now on.

    On a GPU, what lies outside torch is what it was in the proof. NVML, which trials ask, counts the memory of all
    processes on the GPU, and in a long training others come and go.
    """
    if spec.device == "cpu":
        limit_data(data_bytes() + spec.memory_limit)
        return
    room = script.torch_limit
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # otherwise each rank has a context on the first GPU too
    limit_torch(room)
    tell_deepspeed(lambda: max(0, room - torch.cuda.memory_allocated()))


def lift_limit(spec: TrialSpec) -> None:
    """Remove the limit, so that a rank that came to it can still report. torch's allocator is not needed for that."""
    if spec.device == "cpu":
        limit_data(resource.RLIM_INFINITY)
