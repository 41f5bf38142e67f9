"""The settings for a training script, from a new answer or from a best_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ladder.backends.base import Backend, EmittedTraining
from ladder.backends.registry import backend_of
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.emit.answer import Answer
from ladder.emit.config import SECTION, best_config, candidate_key_in, original_text
from ladder.techniques.keys import candidate_of
from ladder.techniques.registry import WAYS_OF_CHECKPOINTING
from ladder.units import GIB
from ladder.workload.lora import Lora
from ladder.workload.script import keeps_its_optimizer
from ladder.workload.workload import OptimizerName, Source

YOUR_MODEL = "your model"
"""A placeholder for the user to replace. It has a space, so it cannot be a Hub id."""


@dataclass(frozen=True, kw_only=True)
class Settings(EmittedTraining):
    """The answer without its measurements, except for the host memory that a job must request."""

    model: str
    """The model for a training program: a Hub id, an absolute folder, or `YOUR_MODEL`."""
    shape: str
    """The model that was tuned, as the user named it."""
    seq_len: int
    optimizer: OptimizerName | None
    """None for a script's own, which no file names."""
    gradient_clipping: float
    micro_batch: int
    checkpoint_every: int
    """One of this many layers is checkpointed; 0 for none."""
    checkpointing: str
    """The name in a candidate's key."""
    environment: Mapping[str, str]
    transformers: str
    """The version that was measured with; empty if unknown."""
    host_memory: int
    """Host memory in bytes that all ranks together used."""
    learning_rate: float | None = None
    """Of the optimizer in the configuration; None if the script brings its own."""
    freeze: tuple[str, ...] = ()
    completions: int | None = None
    """What the script's trainer generates at once on all ranks; None for a training that generates nothing."""
    warnings: tuple[str, ...]
    """Sentences without a full stop; they may contain any characters."""

    @property
    def ranks_of_a_node(self) -> int:
        return self.world_size // self.num_nodes

    @property
    def stage(self) -> int:
        return self.rung.stage

    @property
    def backend(self) -> Backend:
        return backend_of(self.rung)

    @property
    def gradient_checkpointing(self) -> bool:
        return self.checkpoint_every > 0

    @property
    def way_of_checkpointing(self) -> WayOfCheckpointing | None:
        """None for all layers or none."""
        return WAYS_OF_CHECKPOINTING.get(self.checkpointing)


def settings_of(source: Answer | Settings) -> Settings:
    """The settings of an answer: those in its file."""
    return source if isinstance(source, Settings) else settings_in(best_config(source))


def settings_in(document: Mapping[str, Any]) -> Settings:
    """The settings in a best_config.json, as `load_best_config` returns it."""
    section = document[SECTION]
    workload, model = section["workload"], section["model"]
    name, script = original_text(model["name"]), section.get("script", {})
    keeps = keeps_its_optimizer(script.get("kind", ""), script.get("optimizer", ""))
    candidate = candidate_of(candidate_key_in(section), workload["global_batch_size"], section["world_size"])
    return Settings(
        model=_loadable(name, model["source"], model["folder"]),
        shape=name,
        seq_len=workload["seq_len"],
        dtype=workload["dtype"],
        optimizer=None if keeps else workload["optimizer"],
        gradient_clipping=workload["gradient_clipping"],
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        checkpoint_every=candidate.checkpoint_every,
        checkpointing=candidate.checkpointing,
        techniques=candidate.engine.techniques,
        world_size=section["world_size"],
        num_nodes=section["num_nodes"],
        device=section["device"],
        rung=candidate.engine.rung,
        environment=section["environment"],
        transformers=section["versions"].get("transformers", ""),
        host_memory=int(section["host_memory_gib"] * GIB),
        warnings=tuple(section["warnings"]),
        learning_rate=document.get("optimizer", {}).get("params", {}).get("lr"),
        lora=Lora.from_peft(workload["lora"]) if "lora" in workload else None,
        load_in=workload.get("load_in"),
        prepare_kbit=workload.get("prepare_kbit", False),
        freeze=tuple(workload.get("freeze", ())),
        completions=script.get("generation_batch_size"),
    )


def _loadable(name: str, source: Source, folder: str | None) -> str:
    """The name or folder to load. A bundled shape can be loaded only if it was named by a Hub id."""
    if folder is not None:
        return folder
    return name if source == "hub" or (source == "bundled" and "/" in name) else YOUR_MODEL
