"""What DeepSpeed's knobs can be set to."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.backends.base import Choices
from ladder.backends.deepspeed.config import PIN_MEMORY, engine_knobs
from ladder.candidates import Candidate, Engine, Rung
from ladder.step.counted import Device
from ladder.workload.workload import Workload

_FACTORS = {
    "reduce_bucket_size": (0.1, 0.25, 0.5, 2, 4),
    "allgather_bucket_size": (0.1, 0.25, 0.5, 2, 4),
    "stage3_prefetch_bucket_size": (0, 0.25, 0.5, 2, 4),
    "stage3_param_persistence_threshold": (0, 0.1, 10, 100),
    "stage3_max_live_parameters": (0.1, 0.3, 3),
    "sub_group_size": (0.25, 0.5, 2.5, 5),
}
_LARGEST = 1_000_000_000
"""Elements. Chosen: DeepSpeed's largest default (`stage3_max_live_parameters`)."""
_SWITCHES = ("overlap_comm", "round_robin_gradients")
_SELDOM = 4
"""Micro-steps of a step of stage 1, which reduces gradients once in it: with more of them, what overlap gains or costs
is hardly more than noise. Chosen: it cost 9 ms of 213 for OPT-1.3B and 19 of 104 for opt-125m, where it cost most
(measured on two H200, benchmarks/results/compare)."""


def knob_choices(workload: Workload, rung: Rung, world_size: int) -> Choices:
    """The knobs of engines of `rung` with their choices, in elements and switches; empty at stage 0."""
    usual = engine_knobs(workload, Engine(rung), world_size)
    choices: dict[str, tuple[bool | int, ...]] = {}
    for name, factors in _FACTORS.items():
        if usual.get(name):  # a knob that the rung switches off stays off
            values = {min(_LARGEST, int(usual[name] * factor)) // 2 * 2 for factor in factors}  # even: DeepSpeed aligns
            choices[name] = tuple(sorted(values | {usual[name]}))
    choices |= {name: (False, True) for name in _SWITCHES if name in usual}
    if rung.devices:
        choices[PIN_MEMORY] = (False, True)
    return choices


def knobs_in_doubt(candidate: Candidate, world_size: int, device: Device) -> Mapping[str, bool | int]:
    """`overlap_comm`, where stages 1 and 2 reduce gradients between GPUs.

    It hides a slow link, but DeepSpeed then waits for the GPU after each bucket: between two H200 with NVLink, steps
    were 4 to 19 % shorter without it (measured, benchmarks/results/compare).
    """
    rung = candidate.engine.rung
    reduces = world_size > 1 and rung.stage in (1, 2) and rung.offload_optimizer == "none"
    is_seldom = rung.stage == 1 and candidate.accumulation > _SELDOM
    return {"overlap_comm": False} if device == "cuda" and reduces and not is_seldom else {}
