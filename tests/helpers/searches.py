"""Spaces and the records that a search in them leaves, without a launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helpers.values import bundled_workload, make_measurement, make_record
from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.events.outcome import Outcome, Record
from ladder.machine.machine_speed import machine_speed
from ladder.search.auto import auto
from ladder.search.decisions import Measure, Stop
from ladder.search.space import Space
from ladder.search.speed import predict_speed
from ladder.units import GIB

BILLION = bundled_workload("llama-3.2-1b", seq_len=1024, global_batch_size=64)


def make_space(*rungs: str, **changes: object) -> Space:
    """Llama-2-7B on four A100 of 80 GB, without NVMe."""
    names = rungs or tuple(rung.name for rung in RUNGS if "nvme" not in rung.devices)
    settings: dict[str, Any] = {
        "workload": bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=64),
        "world_size": 4,
        "device": "cuda",
        "memory_limit": 80 * GIB,
        "host_memory": 1024 * GIB,
        "engines": tuple(Engine(RUNGS_BY_NAME[name]) for name in names),
        "micro_batches": (1, 2, 4, 8, 16),
        "gpu_name": "NVIDIA A100-SXM4-80GB",
        "num_cores": 64,
    }
    return Space(**settings | changes)


def space_of(*engines: Engine, **changes: Any) -> Space:
    settings: dict[str, Any] = {
        "workload": BILLION,
        "world_size": 1,
        "device": "cuda",
        "memory_limit": 24 * GIB,
        "host_memory": 1 << 60,
        "engines": engines or tuple(map(Engine, RUNGS)),
        "micro_batches": (1, 2, 4),
        "checkpointing": ("1/2",),
    }
    return Space(**settings | changes)


def fitting(space: Space, candidate: Candidate, *, slower: float = 1.0, trial: str = "0001", **measured: Any) -> Record:
    """A record as the prior predicts it, or `slower`; `measured` are changes to its measurement."""
    machine = machine_speed(space.gpu_name, "cuda", space.world_size, space.num_cores)
    speed = predict_speed(space.workload, candidate, world_size=space.world_size, machine=machine)
    seen: dict[str, Any] = {
        "accumulate_seconds": speed.accumulate_seconds * slower,
        "boundary_seconds": speed.boundary_seconds * slower,
        "peak_allocated": 20 * GIB,
        "peak_reserved": 21 * GIB,
        "peak_device": 22 * GIB,
    }
    return make_record(
        candidate,
        trial=trial,
        tokens_per_second=speed.tokens_per_second / slower,
        measurement=make_measurement(**seen | measured),
    )


def out_of_memory(candidate: Candidate, trial: str = "0001") -> Record:
    outcome = Outcome(kind="gpu_oom", moment="backward", sentence="ran out", bytes_asked=2 * GIB, bytes_free=GIB)
    return make_record(candidate, "gpu_oom", trial=trial, outcome=outcome)


def decide(space: Space, records: Sequence[Record]) -> Measure:
    """The next trial of a search that goes on."""
    decision = auto(space, records)
    assert isinstance(decision, Measure), decision
    return decision


def play(space: Space, answer_all: str) -> list[Record]:
    """A whole search in which every candidate fits as predicted, or none does."""
    records: list[Record] = []
    for trial in range(200):
        decision = auto(space, records)
        if isinstance(decision, Stop):
            return records
        name = f"{trial + 1:04d}"
        for candidate in decision.candidates:
            assert candidate.key not in {record.candidate_key for record in records}, "tried twice"
            if answer_all == "oom":
                records.append(out_of_memory(candidate, name))
                break
            records.append(fitting(space, candidate, trial=name))
    raise AssertionError("the search does not end")


def two_small_gpus(**changes: Any) -> Space:
    """Two GPUs of 16 GiB for Llama-2-7B, and no offload: nothing fits."""
    settings: dict[str, Any] = {
        "workload": bundled_workload("llama-2-7b", seq_len=2048, global_batch_size=128),
        "world_size": 2,
        "memory_limit": 16 * GIB,
        "host_memory": 512 * GIB,
        "checkpointing": (),
    }
    return space_of(*(Engine(rung) for rung in RUNGS if not rung.devices), **settings | changes)
