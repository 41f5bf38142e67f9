"""How close an answer is to what its GPUs could do at most, and what takes the rest of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ladder.candidates import Candidate
from ladder.events.outcome import Measurement, Record
from ladder.machine.machine_speed import flops_per_token, forward_flops
from ladder.search.belief import Belief, believe
from ladder.search.space import Space
from ladder.search.speed import micro_step_seconds

_COMMUNICATION = ("reduce", "gather", "exchange", "inputs")
"""The terms of a micro-step in which data moves between devices."""
_LEAST = 0.005
"""Of a step, for a part to be named. Chosen: less rounds to 0 %."""


class StepPart(NamedTuple):
    """A part of a step."""

    short: str
    """In few words, for a table."""
    meaning: str
    seconds: float


_MEANINGS = {
    "products": "matrix products that training needs",
    "recomputing": "forward passes that checkpointing runs again",
    "optimizer": "the optimizer, and what ranks exchange once a step",
    "data": "waiting for data of other GPUs or of the host (predicted)",
    "launches": "waiting for the host to launch kernels (predicted)",
    "other": "all other kernels: attention, norms, activations, the loss",
}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The limit that matrix products alone set, and the parts of a step in seconds.

    The first two parts follow from the products' measured rate, the optimizer's from the measured micro-steps with and
    without it. How long kernels wait for data and for the host is predicted.
    """

    matrix_flops: float
    """Operations per second of one rank in the model's matrix products, as measured in the proof."""
    tokens_per_second: float
    """Of all ranks, if a step had nothing but the products that training needs."""
    share: float
    """The measured speed over that, 0 to 1."""
    step_seconds: float
    parts: tuple[StepPart, ...]
    """They add up to `step_seconds`, less parts below half a percent."""


def bound(space: Space, records: Sequence[Record], best: Record) -> Bound | None:
    """The bound of `best`, a proof; None where its proof did not time the products."""
    seen = best.measurement
    if seen is None or seen.matrix_flops is None or not best.tokens_per_second:
        return None
    candidate, workload = space.by_key[best.candidate_key], space.workload
    of_a_rank = workload.tokens_per_step / space.world_size / seen.matrix_flops
    step = workload.tokens_per_step / best.tokens_per_second
    needed = min(step, of_a_rank * flops_per_token(workload))
    again = min(step - needed, of_a_rank * candidate.checkpointed * forward_flops(workload))
    update = min(step - needed - again, _update_seconds(space, candidate, seen, records))
    left = step - needed - again - update
    data, launches = _waiting(believe(space, records), candidate, step - update)
    waiting = min(1.0, left / (data + launches)) if data + launches > 0 else 0.0
    parts = {"products": needed, "recomputing": again, "optimizer": update}
    parts |= {"data": data * waiting, "launches": launches * waiting}
    parts["other"] = step - sum(parts.values())
    return Bound(
        matrix_flops=seen.matrix_flops,
        tokens_per_second=workload.tokens_per_step / needed,
        share=needed / step,
        step_seconds=step,
        parts=tuple(StepPart(name, _MEANINGS[name], each) for name, each in parts.items() if each >= _LEAST * step),
    )


def _update_seconds(space: Space, candidate: Candidate, seen: Measurement, records: Sequence[Record]) -> float:
    """Seconds of a step's last part: measured with accumulation, else as the model predicts."""
    if seen.accumulate_seconds is not None:
        return max(0.0, seen.boundary_seconds - seen.accumulate_seconds)
    speed = believe(space, records).outlook(candidate).speed
    return seen.boundary_seconds * (1 - speed.accumulate_seconds / speed.boundary_seconds)


def _waiting(belief: Belief, candidate: Candidate, seconds: float) -> tuple[float, float]:
    """Of `seconds` of micro-steps, those that would not be there if data moved, and if kernels started, at once."""
    space = belief.space

    def micro(*without: str) -> float:
        return micro_step_seconds(
            space.workload,
            candidate,
            world_size=space.world_size,
            machine=belief.machine,
            calibration=belief.speed,
            without=without,
        )

    whole = micro()
    return seconds * (1 - micro(*_COMMUNICATION) / whole), seconds * (1 - micro("launch") / whole)
