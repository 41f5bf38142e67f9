"""What a candidate cannot exceed: the speed of one with less work, and its own with a larger micro-batch.

Offload and sharding save memory. To a step of the same micro-batch and checkpointing they add copies, messages and work
on the host, and take nothing away. So where the engine without them was measured, there is no doubt left above it.
A larger micro-batch launches as many kernels for more tokens, and fills the GPU better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Rung
from ladder.events.outcome import Measurement
from ladder.search.space import Space, same_steps
from ladder.step.walk import logits_at_once
from ladder.techniques.registry import TECHNIQUES

_SHARDS_PARAMETERS, _SHARDS_GRADIENTS = 3, 2
"""Derived: the stages of ZeRO."""
_TO_SPARE = 0.97
"""Of the limit: with more memory than this, the allocator may be what slows a micro-batch down. Measured: a micro-batch
that came this near was up to 18 % slower than half of it (benchmarks/results/runs)."""
_INDEXED = 2**31
"""Elements of a tensor that kernels index with 32 bits (derived). Measured: with more logits than these, OPT-1.3B is up
to 12 % and GPT-2 21 % slower than with half the micro-batch (benchmarks/results/sweeps and runs)."""


@cache
def plainer_rungs(rung: Rung, world_size: int) -> tuple[Rung, ...]:
    """The rungs that leave out part of the work of `rung` and add none.

    With several ranks they offload nothing, and their stage is the same; or, for stage 3, stage 2, which gathers
    parameters less often. With one rank nothing can be sharded: they are those of a lower stage that offload no more,
    unless parameters are on the host, where an update need not copy them back. Stage 0 is none for stages 1 and 2,
    whose optimizer works in one piece, and none without DeepSpeed: DDP keeps weights in 32 bits, FSDP2 computes in 16
    (`one_rank_needs_no_stage`). Measured: in the recorded sweeps (benchmarks/results/sweeps), nothing is faster than
    the same on those rungs by more than 2 %, except steps of one or two sequences and opt-125m, where the host decides.
    """
    backend = backend_of(rung)
    alone = world_size == 1 and backend.one_rank_needs_no_stage
    return tuple(other for other in backend.rungs if other != rung and (_alone if alone else _together)(rung, other))


def _together(rung: Rung, other: Rung) -> bool:
    """Whether several ranks do less work on `other`, and none that is added."""
    stages = {rung.stage} | ({_SHARDS_GRADIENTS} if rung.stage == _SHARDS_PARAMETERS else set())
    return other.stage in stages and not other.devices


def _alone(rung: Rung, other: Rung) -> bool:
    """Whether one rank does."""
    if other.stage == 0:
        return bool(rung.stage == _SHARDS_PARAMETERS or rung.devices)
    if not other.devices:
        return other.stage < rung.stage or (other.stage == rung.stage and bool(rung.devices))
    kept = rung.offload_param == "none" and other.offload_optimizer == rung.offload_optimizer
    return other.stage < rung.stage and kept


def plainer(candidate: Candidate, world_size: int) -> Sequence[Candidate]:
    """The same micro-batch, checkpointing and techniques on each of `plainer_rungs`, and with what leaves work out.

    Not every rung among them can have such a technique; no space has the others.
    """
    engine = candidate.engine
    others = [replace(engine, rung=rung, knobs=()) for rung in plainer_rungs(engine.rung, world_size)]
    leaving_out = [technique for technique in TECHNIQUES.values() if technique.leaves_work_out]
    for each in (*others, *([] if engine.knobs else [engine])):
        others += [each.having(technique) for technique in leaving_out if not each.has_slot_of(technique)]
    return [replace(candidate, engine=each) for each in others]


def twins(candidate: Candidate, space: Space) -> Sequence[Candidate]:
    """The same on rungs that make the same step: one rank divides nothing, and adapters have next to nothing to update.

    Measured: stages 0, 1 and 2 of two models with adapters were within 2 % of each other
    (benchmarks/results/against-plain).
    """
    engine, alike = candidate.engine, {0, 1, _SHARDS_GRADIENTS}
    backend = backend_of(engine.rung)
    if space.world_size > 1 or space.workload.lora is None or not backend.one_rank_needs_no_stage:
        return []
    if engine.rung.stage not in alike or engine.rung.devices:
        return []
    rungs = [each for each in backend.rungs if each.stage in alike and not each.devices and each != engine.rung]
    return [replace(candidate, engine=replace(engine, rung=rung)) for rung in rungs]


@dataclass(frozen=True)
class Reached:
    """The speed at which a candidate was seen to train."""

    candidate: Candidate
    tokens_per_second: float
    emptied: bool = False
    """The allocator emptied its cache meanwhile."""
    had_memory: bool = True
    """Enough of the limit was left."""


def had_memory(seen: Measurement, limit: int) -> bool:
    """Whether enough of `limit` bytes was left, so that the allocator slowed nothing down."""
    return not seen.alloc_retries and seen.peak_device <= _TO_SPARE * limit


def shown(candidate: Candidate, tokens_per_second: float, seen: Measurement, limit: int) -> Reached:
    """What a measurement within `limit` bytes shows."""
    return Reached(candidate, tokens_per_second, seen.alloc_retries > 0, had_memory(seen, limit))


def most_of(
    candidate: Candidate, shown: Iterable[Reached], space: Space, promises_more_than: Callable[[Candidate], bool]
) -> float:
    """Tokens/s that `candidate` cannot exceed, as the same steps reached no more; or infinity.

    Without the shortage of memory, it is predicted to be clearly faster than what it `promises_more_than`.
    """
    bounds = (each for each in shown if _is_bound(each, candidate, space, promises_more_than))
    return min((each.tokens_per_second for each in bounds), default=math.inf)


def _is_bound(
    shown: Reached, candidate: Candidate, space: Space, promises_more_than: Callable[[Candidate], bool]
) -> bool:
    """Whether the same steps reach no more with the micro-batch of `candidate` than was `shown`.

    A larger micro-batch than one for which the allocator emptied its cache needs still more memory; it may be faster
    only where fewer micro-steps save something else (measured: FSDP2 by up to 37 %, from micro-batch 2 to 4). A smaller
    one is not faster, but where the allocator, the logits or what is offloaded slowed the larger one down. Measured: of
    508 pairs of micro-batches without offload, in sweeps and stored tunes, the smaller was faster by more than 2 % in
    23, of which 20 had too many logits and 2 too little memory.
    """
    other = shown.candidate
    if candidate == other:
        return True
    if not same_steps(other, candidate) or other.engine.rung.devices:
        return False
    if candidate.micro_batch > other.micro_batch:
        return shown.emptied and not promises_more_than(other)
    step = backend_of(other.engine.rung).assignment(space.workload, other, space.world_size)
    return shown.had_memory and logits_at_once(step) <= _INDEXED
