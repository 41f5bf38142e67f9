"""Answers written by hand, for whatever is emitted or exported from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.emit import Answer
from ladder.events.outcome import Measurement
from ladder.units import GIB
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

SHAPE = dataclasses.replace(resolve_model("llama-2-7b"), name="meta-llama/Llama-2-7b-hf")
MEASUREMENT = Measurement(
    accumulate_seconds=0.9,
    boundary_seconds=1.1,
    spread=0.004,
    num_steps=5,
    peak_allocated=30 * GIB,
    peak_reserved=33 * GIB,
    peak_device=35 * GIB,
    outside_torch=2 * GIB,
    peak_host=20 * GIB,
    watts=2_000.0,
)
AWKWARD = 'it\'s "quite" a $HOME `dir`; # é'


def answer(rung: str = "zero3", *, shape: Any = None, workload: Any = None, **changes: Any) -> Answer:
    """A winner on four GPUs; `shape` and `workload` are changes to those."""
    settings: dict[str, Any] = {
        "workload": Workload(
            model=dataclasses.replace(SHAPE, **(shape or {})),
            **{"task": "causal-lm", "seq_len": 2048, "global_batch_size": 32, **(workload or {})},
        ),
        "candidate": Candidate(Engine(RUNGS_BY_NAME[rung]), checkpoint_every=1, micro_batch=4, accumulation=2),
        "measurement": MEASUREMENT,
        "tokens_per_second": 32_768.0,
        "step_seconds": 2.0,
        "mfu": 0.41,
        "bound": 80_000.0,
        "world_size": 4,
        "device": "cuda",
        "gpu_name": "NVIDIA H200",
        "memory_limit": 40 * GIB,
        "host_threads": 4,
        "allocator": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "nvme_path": None,
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
        "run_dir": Path("/runs/one"),
        "proof": {"steps": 10, "evaluation": True, "gathered_weights": True, "tokens_per_second": 32_700.5},
        "warnings": ("the GPU was throttled",),
    }
    return Answer(**settings | changes)
