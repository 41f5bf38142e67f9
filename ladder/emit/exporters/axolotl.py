"""axolotl: a fragment with the keys of its pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ladder.emit.accelerate import to_yaml
from ladder.emit.exporters.base import Exporter, opening_comment
from ladder.emit.nodes import PORT
from ladder.emit.settings import Settings
from ladder.emit.trainer import CHECKPOINTING, CHECKPOINTING_KWARGS, trainer_arguments


class Axolotl(Exporter):
    name = "axolotl"
    trains_causal_lms_only = True
    words_of_adapters = MappingProxyType(
        {
            "modules_to_save": "lora_modules_to_save",
            "target_modules": "lora_target_modules",
            "target_parameters": "lora_target_parameters",
            "layers_to_transform": "peft_layers_to_transform",
            "layers_pattern": "peft_layers_pattern",
        }
    )

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        arguments = trainer_arguments(settings, config, checkpointing=CHECKPOINTING)
        fragment = {
            "base_model": settings.model,
            "sequence_len": settings.seq_len,
            "micro_batch_size": settings.micro_batch,
            "eval_batch_size": settings.micro_batch,
            "gradient_accumulation_steps": settings.accumulation,
            CHECKPOINTING: settings.gradient_checkpointing,
            # Both, because axolotl defaults to bf16 and then ignores fp16.
            "bf16": settings.dtype == "bf16",
            "fp16": settings.dtype == "fp16",
            "max_grad_norm": settings.gradient_clipping,
            **({"optimizer": arguments["optim"]} if "optim" in arguments else {}),
            **self.of_backend(settings, config),
        }
        if settings.gradient_checkpointing:
            fragment[CHECKPOINTING_KWARGS] = arguments[CHECKPOINTING_KWARGS]
        fragment |= _adapters(settings) | self.more_of_adapters(settings)
        self.apply(settings, fragment)
        place = f"--nproc_per_node={settings.ranks_of_a_node}"
        if settings.num_nodes > 1:
            place += f" --nnodes={settings.num_nodes} --rdzv_backend=c10d --rdzv_endpoint=FIRST-NODE:{PORT}"
        run = f"axolotl train your.yaml --launcher torchrun -- {place}"
        return opening_comment(settings, run) + to_yaml(fragment)


def _adapters(settings: Settings) -> dict[str, Any]:
    """Adapters and quantisation in axolotl's words."""
    lora = settings.lora
    if lora is None:
        return {}
    words: dict[str, Any] = {
        "adapter": "qlora" if settings.load_in == "4bit" else "lora",
        "lora_r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        **({"lora_target_linear": True} if lora.is_everywhere else {"lora_target_modules": list(lora.targets)}),
        "peft_use_rslora": lora.rslora,
        "peft_use_dora": lora.dora,
    }
    if settings.load_in is not None:
        words[f"load_in_{settings.load_in}"] = True
    return words
