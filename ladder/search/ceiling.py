"""What an engine cannot exceed: the speed of one that leaves out part of its work.

Offload and sharding save memory. To a step of the same micro-batch and checkpointing they add copies, messages and work
on the host, and take nothing away. So where the engine without them was measured, there is no doubt left above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Rung

_SHARDS_PARAMETERS, _SHARDS_GRADIENTS = 3, 2
"""Derived: the stages of ZeRO."""


@cache
def plainer_rungs(rung: Rung, world_size: int) -> tuple[Rung, ...]:
    """The rungs that leave out part of the work of `rung` and add none.

    They offload nothing. Their stage is the same; or, for stage 3, stage 2, which gathers parameters less often; or,
    with one rank, where nothing can be sharded, stage 0 of DeepSpeed (DDP keeps weights in 32 bits, FSDP2 computes in
    16: `one_rank_needs_no_stage`). Stages 0, 1 and 2 are too close to each other for such a rule. Measured: in the
    recorded sweeps (benchmarks/results/sweeps), nothing is faster than the same on those rungs by more than 2 %, except
    steps of one or two sequences, where a host that is disturbed decides.
    """
    stages = {rung.stage}
    if rung.stage == _SHARDS_PARAMETERS:
        stages.add(_SHARDS_GRADIENTS)
    backend = backend_of(rung)
    if world_size == 1 and backend.one_rank_needs_no_stage and (rung.stage == _SHARDS_PARAMETERS or rung.devices):
        stages.add(0)
    return tuple(other for other in backend.rungs if other != rung and other.stage in stages and not other.devices)


def plainer(candidate: Candidate, world_size: int) -> Sequence[Candidate]:
    """The same micro-batch, checkpointing and techniques on each of `plainer_rungs`."""
    engine = candidate.engine
    return [
        replace(candidate, engine=replace(engine, rung=rung, knobs=()))
        for rung in plainer_rungs(engine.rung, world_size)
    ]
