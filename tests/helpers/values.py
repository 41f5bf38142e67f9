"""Workloads, candidates, records and trials written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import Candidate, Engine, Problem, Technique
from ladder.events.outcome import Measurement, Outcome, OutcomeKind, Record
from ladder.events.protocol import TrialSpec
from ladder.events.step_policy import CandidateSpec, StepPolicy
from ladder.machine.described import Gpu, Machine
from ladder.optimizers.registry import OPTIMIZERS
from ladder.tuning.trial_request import environment_of, rank_modules_of
from ladder.units import GIB
from ladder.workload.shapes import shape_from_config
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

TINY_CONFIG: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "tiny" / "config.json").read_text())
TINY = shape_from_config(TINY_CONFIG, name="tiny", source="file")
FOUR_LAYERS_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
"""Of a Llama so large that weights and states, and not the workspace of a library, decide what a rank holds."""
WORLD_SIZE = 2
T = TypeVar("T")
PAPER: dict[str, Any] = {"launcher": "simulated", "machine": "h200", "gpus": 1, "quiet": True}
"""Options of a tune on one H200 on paper."""


def there(found: T | None) -> T:
    """What was found, where something has to be."""
    assert found is not None
    return found


def bundled_workload(model: str = "tiny-llama", **changes: Any) -> Workload:
    """A causal-lm workload on a bundled shape; `changes` are of the workload's own fields."""
    settings: dict[str, Any] = {"task": "causal-lm", "seq_len": 64, "global_batch_size": 8} | changes
    return Workload(model=resolve_model(model), **settings)


def make_candidate(
    rung: str = "zero2", *, checkpointing: bool = True, micro_batch: int = 1, accumulation: int = 4
) -> Candidate:
    return Candidate(Engine(RUNGS_BY_NAME[rung]), checkpointing, micro_batch, accumulation)


def make_measurement(**changes: Any) -> Measurement:
    settings: dict[str, Any] = {
        "accumulate_seconds": 1.0,
        "boundary_seconds": 2.0,
        "spread": 0.01,
        "num_steps": 3,
        "peak_allocated": 2 * GIB,
        "peak_reserved": 3 * GIB,
        "peak_device": 4 * GIB,
        "outside_torch": GIB,
        "peak_host": 5 * GIB,
    }
    return Measurement(**settings | changes)


def make_record(
    candidate: Candidate, kind: OutcomeKind = "fits", *, tokens_per_second: float | None = 100.0, **changes: Any
) -> Record:
    """A record with a measurement where it fits, and with the given outcome where it does not."""
    fits = kind == "fits"
    settings: dict[str, Any] = {
        "candidate_key": candidate.key,
        "trial": "0001",
        "purpose": "measure",
        "outcome": Outcome(kind=kind, sentence="" if fits else f"ended in {kind}", moment=None if fits else "forward"),
        "measurement": make_measurement() if fits else None,
        "tokens_per_second": tokens_per_second if fits else None,
    }
    return Record(**settings | changes)


def as_a_rank_sees(candidate: Candidate) -> CandidateSpec:
    names = ("key", "checkpoint_every", "micro_batch", "accumulation", "offload_activations")
    return CandidateSpec(**{name: getattr(candidate, name) for name in names})


def tiny_trial(
    folder: Path,
    *micro_batches: int,
    rung: str = "zero2",
    memory_limit: int = GIB,
    technique: Technique | None = None,
    ranks: int = WORLD_SIZE,
    accumulation: int = 2,
    **changes: Any,
) -> TrialSpec:
    """A real trial of a two-layer Llama on CPU ranks, one candidate for each micro-batch."""
    workload = Workload(model=TINY, task="causal-lm", seq_len=64, global_batch_size=ranks * accumulation)
    candidates = [make_candidate(rung, micro_batch=size, accumulation=accumulation) for size in micro_batches]
    engine = candidates[0].engine.having(technique) if technique is not None else candidates[0].engine
    backend = backend_of(engine.rung)
    config = backend.configuration(
        workload, engine, micro_batch=micro_batches[0], accumulation=accumulation, world_size=ranks, nvme_path=None
    )
    return TrialSpec(
        trial=folder.name,
        folder=str(folder),
        device="cpu",
        world_size=ranks,
        model_config_json=TINY_CONFIG,
        task="causal-lm",
        seq_len=workload.seq_len,
        optimizer=workload.optimizer,
        optimizer_module=OPTIMIZERS[workload.optimizer].rank_module,
        dtype="bf16",
        backend_module=backend.rank_module,
        deepspeed=config,
        techniques=tuple(each.label for each in engine.techniques),
        environment=environment_of(engine, ranks),
        rank_modules=rank_modules_of(engine),
        candidates=tuple(map(as_a_rank_sees, candidates)),
        memory_limit=memory_limit,
        **{"steps": StepPolicy(maximum=3, seconds=0.2)} | changes,
    )


# A real tune of few and short steps that still meets all there is: a rung that runs out of memory while it builds its
# engine, one that fits, losses compared, a proof. zero0's engine needs 425 MiB, and zero2 never more than 400: the
# shorter the sequences, the less comes on top.
SMALL_TUNE = ["tune", "tiny-llama", "--gpus", "0", "--gpu-memory", "390MiB", "--seq-len", "16"]
SMALL_TUNE += ["--global-batch-size", "4", "--micro-batch", "1", "--rung", "zero0", "--rung", "zero2"]
SMALL_TUNE += ["--strategy", "exhaustive", "--run-dir", "ladder-runs/small"]


def problem_for(workload: Workload, world_size: int = 1, device: Any = "cuda", **changes: Any) -> Problem:
    """`workload` on a machine with plenty of memory."""
    facts = {"memory_limit": 1 << 50, "host_memory": 1 << 50, **changes}
    return Problem(workload=workload, world_size=world_size, device=device, **facts)


def machine_with(gpus: int, device: str = "cuda") -> Machine:
    """H200s on one host, or CPU ranks in their place."""
    return Machine(
        device=device,  # type: ignore[arg-type]
        world_size=gpus,
        gpus=tuple(Gpu(f"GPU-{rank}", "NVIDIA H200", 140 * GIB) for rank in range(gpus)) if device == "cuda" else (),
        memory_limit=140 * GIB,
        host_memory=500 * GIB,
        num_cores=32,
    )
