"""What to train with after a training's memory ran out: a measured candidate that takes less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.emit.settings import Settings
from ladder.emit.trainer import arguments_in_place
from ladder.errors import LadderError
from ladder.events.memory_limit import for_torch
from ladder.events.outcome import Measurement
from ladder.search.space import Space, measured
from ladder.tuning.stored import stored_output
from ladder.workload.script import OwnTraining

_LESS = 0.95
"""A candidate to step down to holds at most this share of the memory. Chosen: more than measurements of one stray."""
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_NO_LAYOUT = ("zero_optimization", "aio", *_BATCH)
"""Sections of a DeepSpeed configuration that do not decide, as a whole, on what a checkpoint looks like."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How the ranks of a run train."""

    settings: Settings
    candidate: Candidate
    config: Mapping[str, Any]
    """DeepSpeed's."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of a loop's own, that set its micro-batch and accumulation."""
    planned: OwnTraining | None = None
    """What the script makes by itself, if the command is the one that was tuned and the batch its own."""
    resume: str = ""
    """The checkpoint of a Trainer from which it goes on; empty for its beginning."""
    memory_limit: int = 0
    """Bytes that each rank may use; 0 for all that there is."""
    torch_limit: int = 0
    """How many of them torch's allocator may, on a GPU."""

    @property
    def arguments(self) -> dict[str, Any]:
        """TrainingArguments for a script that uses the Trainer."""
        return arguments_in_place(self.settings, self.config)

    @property
    def layout(self) -> Mapping[str, Any]:
        """Equal for plans that read each other's checkpoints.

        Measured with DeepSpeed 0.19.8 on two CPU ranks, by a training of three steps before and after a load: stages 1
        and 2 read each other's checkpoints exactly. With another order of gradients (`round_robin_gradients`), or
        without an offload of the optimizer that the other had, the load succeeds and training goes on with wrong
        moments; with a new offload it fails. Universal checkpoints are no way out: stages 1 and 2 and stage 3 cannot
        read each other's, and stage 3 gives all parameter groups the weight decay of the first.
        """
        zero = self.config.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        return {
            **{name: value for name, value in self.config.items() if name not in _NO_LAYOUT},
            "backend": backend_of(self.candidate.engine.rung).name,
            "stage": {1: "1 or 2", 2: "1 or 2"}.get(stage, stage),
            "optimizer on": zero.get("offload_optimizer", {}).get("device", "the GPU"),
            "order": bool(zero.get("round_robin_gradients", False)),
            "groups": zero.get("sub_group_size") if stage == 3 else None,
            "optim": self.arguments.get("optim"),
        }


def smaller(run_dir: Path, plan: RunPlan, tried: set[str], checkpoint: bool, outcome: str) -> RunPlan | None:
    """The fastest candidate that the tune in `run_dir` measured with less memory than that of `plan`; None without one.

    The memory is the host's if that is the `outcome`. With a `checkpoint`, only a candidate that can read it; without,
    training begins again, and any will do.
    """
    try:
        stored = stored_output(run_dir)
    except LadderError:  # the run folder is gone
        return None
    space: Space = stored.result.space
    records = measured(stored.result.records)
    now = records.get(plan.candidate.key)
    if now is None or now.measurement is None:
        return None
    held = _host if outcome in ("host_oom", "pinned_oom") else _device
    limit = _LESS * held(now.measurement)
    fastest_first = sorted(records, key=lambda key: -(records[key].tokens_per_second or 0.0))
    for key in fastest_first:
        seen = records[key].measurement
        if key in tried or key not in space.by_key or seen is None or not records[key].tokens_per_second:
            continue
        found = _with(plan, space.by_key[key], space)
        if held(seen) <= limit and (not checkpoint or found.layout == plan.layout):
            limit = plan.memory_limit
            of_torch = for_torch(limit, seen.outside_torch, seen.peak_reserved) if limit else 0
            return replace(found, torch_limit=of_torch)
    return None


def _device(seen: Measurement) -> int:
    return seen.peak_device


def _host(seen: Measurement) -> int:
    return seen.peak_host


def _with(plan: RunPlan, candidate: Candidate, space: Space) -> RunPlan:
    config = backend_of(candidate.engine.rung).configuration(
        space.workload,
        candidate.engine,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        world_size=plan.settings.world_size,
        nvme_path=Path(space.nvme_path) if space.nvme_path else None,
    )
    config |= {name: plan.config[name] for name in ("gradient_clipping",) if name in plan.config}  # seen in the proof
    if "train_batch_size" not in plan.config or plan.settings.device == "cpu":
        config.pop("train_batch_size", None)  # as in best_config.json of stage 3 on the CPU
    settings = replace(
        plan.settings,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        checkpoint_every=candidate.checkpoint_every,
        checkpointing=candidate.checkpointing,
        techniques=candidate.engine.techniques,
        rung=candidate.engine.rung,
    )
    return replace(plan, settings=settings, candidate=candidate, config=config)
