"""What a training script has to be told, from an answer just proven or from a best_config.json read later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ladder.candidates import Technique
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.emit.answer import Answer
from ladder.emit.config import SECTION, candidate_key_in, launch_environment, model_folder, original_text
from ladder.techniques.keys import candidate_of
from ladder.techniques.registry import WAYS_OF_CHECKPOINTING
from ladder.units import GIB
from ladder.workload.workload import Dtype, OptimizerName, Source

YOUR_MODEL = "your model"
"""Where the user has to name one: no Hub id has a space, so that nobody's model is loaded for it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The answer without its measurements, but for the memory that a job has to ask for."""

    model: str
    """What a training program loads: a Hub id, an absolute folder, or `YOUR_MODEL`."""
    shape: str
    """What was tuned, as it was asked for."""
    seq_len: int
    dtype: Dtype
    optimizer: OptimizerName
    gradient_clipping: float
    micro_batch: int
    accumulation: int
    checkpoint_every: int
    """Layers of which one is checkpointed; 0 for none."""
    checkpointing: str
    """In a word, as in a candidate's key."""
    techniques: tuple[Technique, ...]
    world_size: int
    device: Literal["cuda", "cpu"]
    stage: int
    environment: Mapping[str, str]
    transformers: str
    """The version that was measured with; empty where it is not known."""
    host_memory: int
    """Bytes on the host that all ranks together were seen to hold."""
    warnings: tuple[str, ...]
    """Sentences without their full stop, which may hold anything."""

    @property
    def gradient_checkpointing(self) -> bool:
        return self.checkpoint_every > 0

    @property
    def way_of_checkpointing(self) -> WayOfCheckpointing | None:
        """None for all layers or none."""
        return WAYS_OF_CHECKPOINTING.get(self.checkpointing)


def settings_of(source: Answer | Settings) -> Settings:
    """The settings of an answer."""
    if isinstance(source, Settings):
        return source
    workload, candidate = source.workload, source.candidate
    return Settings(
        model=_loadable(workload.model.name, workload.model.source, model_folder(workload.model)),
        shape=workload.model.name,
        seq_len=workload.seq_len,
        dtype=workload.dtype,
        optimizer=workload.optimizer,
        gradient_clipping=workload.gradient_clipping,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        checkpoint_every=candidate.checkpoint_every,
        checkpointing=candidate.checkpointing,
        techniques=candidate.engine.techniques,
        world_size=source.world_size,
        device=source.device,
        stage=candidate.engine.rung.stage,
        environment=launch_environment(source),
        transformers=source.versions.get("transformers", ""),
        host_memory=source.measurement.peak_host,
        warnings=source.warnings,
    )


def settings_in(document: Mapping[str, Any]) -> Settings:
    """The settings in a best_config.json, as `load_best_config` returns it."""
    section = document[SECTION]
    workload, model = section["workload"], section["model"]
    name = original_text(model["name"])
    candidate = candidate_of(candidate_key_in(section), workload["global_batch_size"], section["world_size"])
    return Settings(
        model=_loadable(name, model["source"], model["folder"]),
        shape=name,
        seq_len=workload["seq_len"],
        dtype=workload["dtype"],
        optimizer=workload["optimizer"],
        gradient_clipping=workload["gradient_clipping"],
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        checkpoint_every=candidate.checkpoint_every,
        checkpointing=candidate.checkpointing,
        techniques=candidate.engine.techniques,
        world_size=section["world_size"],
        device=section["device"],
        stage=candidate.engine.rung.stage,
        environment=section["environment"],
        transformers=section["versions"].get("transformers", ""),
        host_memory=int(section["host_memory_gib"] * GIB),
        warnings=tuple(section["warnings"]),
    )


def _loadable(name: str, source: Source, folder: str | None) -> str:
    """A bundled shape that goes by a Hub id stands in for that model; by ladder's own name it is none to load."""
    if folder is not None:
        return folder
    return name if source == "hub" or (source == "bundled" and "/" in name) else YOUR_MODEL
