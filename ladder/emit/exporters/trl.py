"""TRL: its `accelerate_config` and the Trainer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladder.emit.accelerate import to_yaml
from ladder.emit.exporters.base import (
    Exporter,
    making_accelerate,
    opening_comment,
)
from ladder.emit.files import OutputPaths
from ladder.emit.settings import Settings
from ladder.emit.trainer import CHECKPOINTING, trainer_arguments
from ladder.text import shown


class Trl(Exporter):
    name = "trl"
    trains_causal_lms_only = True

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        arguments = trainer_arguments(settings, config, checkpointing=CHECKPOINTING)
        # accelerate's file names the DeepSpeed configuration, so the Trainer's key must not.
        del arguments["deepspeed"]
        accelerate = OutputPaths.beside(config).accelerate
        fragment = {
            "model_name_or_path": settings.model,
            "max_length": settings.seq_len,
            "accelerate_config": str(accelerate),
            **arguments,
        }
        missing = ""
        if not accelerate.exists():
            missing = f"# First write its accelerate_config:\n#   {shown(making_accelerate(config))}\n"
        return opening_comment(settings, "trl sft --config your.yaml") + missing + to_yaml(fragment)
