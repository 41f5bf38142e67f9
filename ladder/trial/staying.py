"""A rank between two trials: what the last one held is freed, and the server names the next one.

A new process needs a CUDA context, a process group and the first run of each kernel; one that stays has them already.
"""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from ladder.events.as_json import from_json
from ladder.events.protocol import TrialSpec
from ladder.trial.backends import backend_of
from ladder.trial.descendants import has_children
from ladder.trial.gauge import Gauge
from ladder.trial.techniques import techniques_of

_MOST_BYTES = 4096
"""Of a line from the server. Defined in Linux: the longest path."""


class Line:
    """A rank's line to the server: `end` is one of two sockets, and the server has the other."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def next_trial(self) -> TrialSpec | None:
        """Tell the server that this rank is ready for another trial, and wait for it; None if there is none."""
        self._end.send(b"ready")
        path = self._end.recv(_MOST_BYTES)
        return from_json(TrialSpec, Path(os.fsdecode(path)).read_bytes()) if path else None


def can_stay(spec: TrialSpec, gauge: Gauge) -> bool:
    """Whether the trial, which ended well, left this process as it found it, and those of all other ranks.

    Its model and engine must have no reference left. All ranks have to ask.
    """
    leaves = spec.may_stay and backend_of(spec).can_be_followed(spec)
    leaves = leaves and all(technique.can_be_followed for technique in techniques_of(spec))
    if not leaves:  # the same on all ranks
        return False
    gc.collect()  # engines are in reference cycles
    is_clear = gauge.is_clear() and not has_children()
    flag = torch.tensor([float(is_clear)], device=spec.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag[0] > 0)


def log_to(folder: str, rank: int) -> None:
    """Send what this process prints to the log of `rank` in a trial's folder."""
    log = os.open(Path(folder) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
