"""What a training script has to be told, from an answer just proven or from a best_config.json read later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ladder.candidates import RUNGS_BY_NAME
from ladder.emit.answer import Answer
from ladder.emit.config import SECTION, launch_environment, original_text
from ladder.workload import Dtype, OptimizerName


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The answer without its measurements."""

    model: str
    seq_len: int
    dtype: Dtype
    optimizer: OptimizerName
    gradient_clipping: float
    micro_batch: int
    accumulation: int
    checkpoint_every: int
    """Layers of which one is checkpointed; 0 for none."""
    liger: bool
    world_size: int
    device: Literal["cuda", "cpu"]
    stage: int
    environment: Mapping[str, str]

    @property
    def gradient_checkpointing(self) -> bool:
        return self.checkpoint_every > 0


def settings_of(source: Answer | Settings) -> Settings:
    """The settings of an answer."""
    if isinstance(source, Settings):
        return source
    workload, candidate = source.workload, source.candidate
    return Settings(
        model=workload.model.name,
        seq_len=workload.seq_len,
        dtype=workload.dtype,
        optimizer=workload.optimizer,
        gradient_clipping=workload.gradient_clipping,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        checkpoint_every=candidate.checkpoint_every,
        liger=candidate.engine.liger,
        world_size=source.world_size,
        device=source.device,
        stage=candidate.engine.rung.stage,
        environment=launch_environment(source),
    )


def checkpoint_every_in(section: Mapping[str, Any]) -> int:
    """`Candidate.checkpoint_every` of a "ladder" section; older files say only whether every layer is checkpointed."""
    return int(section.get("checkpoint_every", section["gradient_checkpointing"]))


def settings_in(document: Mapping[str, Any]) -> Settings:
    """The settings in a best_config.json, as `load_best_config` returns it."""
    section = document[SECTION]
    workload = section["workload"]
    return Settings(
        model=original_text(section["model"]["name"]),
        seq_len=workload["seq_len"],
        dtype=workload["dtype"],
        optimizer=workload["optimizer"],
        gradient_clipping=workload["gradient_clipping"],
        micro_batch=section["micro_batch"],
        accumulation=section["accumulation"],
        checkpoint_every=checkpoint_every_in(section),
        liger=section.get("liger", False),  # files written before there was a choice have none
        world_size=section["world_size"],
        device=section["device"],
        stage=RUNGS_BY_NAME[section["rung"]].stage,
        environment=section["environment"],
    )
