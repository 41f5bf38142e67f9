"""TRL: its `accelerate_config` and the Trainer's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ladder.emit.accelerate import to_yaml
from ladder.emit.exporters.base import Exporter, making_accelerate, opening_comment
from ladder.emit.files import OutputPaths
from ladder.emit.settings import Settings
from ladder.emit.trainer import CHECKPOINTING, trainer_arguments
from ladder.text import shown
from ladder.workload.lora import Lora


class Trl(Exporter):
    name = "trl"
    trains_causal_lms_only = True
    words_of_adapters = MappingProxyType(
        {
            "modules_to_save": "lora_modules_to_save",
            "target_modules": "lora_target_modules",
            "target_parameters": "lora_target_parameters",
        }
    )

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        # accelerate's file chooses the backend, so the Trainer's keys must not.
        arguments = trainer_arguments(settings, config, checkpointing=CHECKPOINTING, of_backend=False)
        accelerate = OutputPaths.beside(config).accelerate
        fragment = {
            "model_name_or_path": settings.model,
            "max_length": settings.seq_len,
            "accelerate_config": str(accelerate),
            **arguments,
            **self.of_backend(settings, config),
            **_adapters(settings),
            **self.more_of_adapters(settings),
        }
        missing = ""
        if not accelerate.exists():
            missing = f"# First write its accelerate_config:\n#   {shown(making_accelerate(config))}\n"
        return opening_comment(settings, "trl sft --config your.yaml") + missing + to_yaml(fragment)


def _targets(lora: Lora) -> list[str]:
    """TRL gives peft a single name as a text, which peft takes as a pattern for whole names."""
    if len(lora.targets) == 1 and not lora.is_everywhere:
        return [rf".*\.{lora.targets[0]}"]
    return list(lora.targets)


def _adapters(settings: Settings) -> dict[str, Any]:
    """Adapters and quantisation in the words of TRL's ModelConfig."""
    lora = settings.lora
    if lora is None:
        return {}
    words: dict[str, Any] = {
        "use_peft": True,
        "lora_r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "lora_target_modules": _targets(lora),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
    }
    if settings.load_in == "4bit":
        words |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
        if settings.backend.divides_weights(settings.rung):  # which needs parameters of one type
            words["bnb_4bit_quant_storage"] = {"bf16": "bfloat16", "fp16": "float16"}[settings.dtype]
    elif settings.load_in == "8bit":
        words["load_in_8bit"] = True
    return words
