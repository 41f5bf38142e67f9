"""The Hugging Face Trainer's arguments: what the DeepSpeed JSON cannot say, and what must agree with it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from ladder.emit.answer import Answer
from ladder.emit.settings import Settings, settings_of


def trainer_arguments(answer: Answer | Settings, config_path: Path) -> dict[str, Any]:
    """TrainingArguments under which a Trainer script trains as measured; HfArgumentParser.parse_json_file reads them.

    The Trainer refuses to start where micro-batch, accumulation, clipping or dtype differ from `config_path`'s. It
    holds nothing of the user's own: learning rate, schedule, data and output folder stay theirs.
    """
    settings = settings_of(answer)
    arguments: dict[str, Any] = {
        "deepspeed": os.path.abspath(config_path),
        "per_device_train_batch_size": settings.micro_batch,
        # Proven with an evaluation pass at this size; the Trainer's own default of 8 was not.
        "per_device_eval_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        # Known by this name to every transformers 5; from 5.23 it is an alias that warns.
        "gradient_checkpointing": settings.gradient_checkpointing,
    }
    if settings.gradient_checkpointing:
        partial = {"every_n_layers": settings.checkpoint_every} if settings.checkpoint_every > 1 else {}
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False, **partial}
    if settings.liger:
        arguments["use_liger_kernel"] = True
    arguments |= {settings.dtype: True, "max_grad_norm": settings.gradient_clipping, **_optimizer(settings)}
    if settings.device == "cpu":
        arguments["use_cpu"] = True
    return arguments


def trainer_command_line(arguments: dict[str, Any]) -> str:
    """`arguments` as one line for a shell, every value quoted, to put after the name of a Trainer script."""
    words: list[str] = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += [f"--{name}", shlex.quote(text)]
    return " ".join(words)


def _optimizer(settings: Settings) -> dict[str, Any]:
    """The Trainer's name for the optimizer that was measured."""
    if settings.optimizer == "sgd":
        return {"optim": "sgd"}
    # With an optimizer offload accelerate replaces either form by DeepSpeedCPUAdam.
    adamw = {"optim": "adamw_torch_fused"}
    # The Trainer has no plain Adam; AdamW without decay takes the same steps.
    return adamw | {"weight_decay": 0.0} if settings.optimizer == "adam" else adamw
