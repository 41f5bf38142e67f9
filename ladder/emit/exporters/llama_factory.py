"""LLaMA-Factory: a fragment with the keys of its model and training arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ladder.emit.accelerate import to_yaml
from ladder.emit.exporters.base import Exporter, as_text, opening_comment
from ladder.emit.nodes import PORT
from ladder.emit.settings import Settings
from ladder.emit.trainer import CHECKPOINTING, CHECKPOINTING_KWARGS, trainer_arguments


class LlamaFactory(Exporter):
    name = "llama-factory"
    trains_causal_lms_only = True
    words_of_adapters = MappingProxyType({"modules_to_save": "additional_target"})

    program = ("-m", "llamafactory.launcher")

    def training_words(self, settings: Settings, config: Path) -> dict[str, Any]:
        arguments = trainer_arguments(settings, config, checkpointing=CHECKPOINTING)
        # It has another name for the switch of checkpointing.
        for name in (CHECKPOINTING, CHECKPOINTING_KWARGS):
            arguments.pop(name, None)
        arguments["disable_gradient_checkpointing"] = not settings.gradient_checkpointing
        if settings.gradient_checkpointing:
            arguments["use_reentrant_gc"] = False  # as it was measured
        return arguments

    def text(self, settings: Settings, document: Mapping[str, Any], config: Path) -> str:
        fragment = {
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": settings.model,
            "finetuning_type": "full",
            "cutoff_len": settings.seq_len,
            **_adapters(settings),
            **self.more_of_adapters(settings),
            **self.training_words(settings, config),
        }
        notes = self.apply(settings, fragment)
        # With OPTIM_TORCH, its default, it replaces the allocator's settings by its own.
        place = f"NPROC_PER_NODE={settings.ranks_of_a_node}"
        if settings.num_nodes > 1:
            place += f" NNODES={settings.num_nodes} NODE_RANK=THIS-NODE MASTER_ADDR=FIRST-NODE MASTER_PORT={PORT}"
        run = f"OPTIM_TORCH=0 FORCE_TORCHRUN=1 {place} llamafactory-cli train your.yaml"
        return opening_comment(settings, run) + as_text(notes) + to_yaml(fragment)


def _adapters(settings: Settings) -> dict[str, Any]:
    """Adapters and quantisation in LLaMA-Factory's words."""
    lora = settings.lora
    if lora is None:
        return {}
    words: dict[str, Any] = {
        "finetuning_type": "lora",
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "lora_target": "all" if lora.is_everywhere else ",".join(lora.targets),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
    }
    if settings.load_in is not None:
        words |= {"quantization_method": "bnb", "quantization_bit": int(settings.load_in[0])}
    return words
