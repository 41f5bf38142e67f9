"""The Hugging Face Trainer's arguments: those that DeepSpeed's JSON cannot hold, and those that must agree with it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from ladder.emit.answer import Answer
from ladder.emit.settings import Settings, settings_of
from ladder.optimizers.registry import OPTIMIZERS
from ladder.workload.workload import Dtype

CHECKPOINTING = "gradient_checkpointing"
"""The Trainer's name for it up to transformers 5.22; programs built on the Trainer still use it."""
CHECKPOINTING_KWARGS = f"{CHECKPOINTING}_kwargs"
_BARE = ("fsdp", True)
"""The Trainer's parser reads a value after this option as the way to shard, also if it is `true`."""
_NEWER_CHECKPOINTING, _NEWER_SINCE = "activation_checkpointing", Version("5.23")


def trainer_arguments(
    answer: Answer | Settings,
    config: Path | Mapping[str, Any],
    *,
    checkpointing: str | None = None,
    of_backend: bool = True,
) -> dict[str, Any]:
    """TrainingArguments with which a Trainer script trains as measured, for HfArgumentParser.parse_json_file.

    The Trainer does not start if micro-batch, accumulation, clipping or dtype differ from those of `config`, the
    backend's configuration or its path. Learning rate, schedule, data and output folder are not set; nor is what
    chooses the backend if not `of_backend`. `checkpointing` is the name of the switch for gradient checkpointing; None
    for the name in the transformers version that was measured with.
    """
    settings = settings_of(answer)
    switch = checkpointing or _checkpointing_name(settings.transformers)
    arguments: dict[str, Any] = {
        **(settings.backend.trainer_arguments(settings, _as_named(config)) if of_backend else {}),
        "per_device_train_batch_size": settings.micro_batch,
        # The proof's evaluation pass had this size; the Trainer's default of 8 is not proven to fit.
        "per_device_eval_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation,
        switch: settings.gradient_checkpointing,
    }
    if settings.gradient_checkpointing:
        way = settings.way_of_checkpointing
        arguments[f"{switch}_kwargs"] = {"use_reentrant": False, **(way.trainer_options() if way else {})}
    # What a technique says of these comes last.
    last: dict[str, Any] = {**precision_of(settings.dtype), "max_grad_norm": settings.gradient_clipping}
    last |= _optimizer(settings)
    for technique in settings.techniques:
        for name, value in technique.trainer_arguments().items():
            (last if name in last else arguments)[name] = value
    arguments |= last
    if settings.learning_rate is not None:
        arguments["learning_rate"] = settings.learning_rate  # the Trainer compares it with the configuration's
    if settings.device == "cpu":
        arguments["use_cpu"] = True
    if settings.completions is not None:  # the same whatever the micro-batch; evaluation needs whole groups of them
        del arguments["per_device_eval_batch_size"]
        arguments |= {"generation_batch_size": settings.completions, "steps_per_generation": None}
    return arguments


def precision_of(dtype: Dtype) -> dict[str, bool]:
    """TrainingArguments for a precision; some programs, as TRL, have bf16 where nothing is said."""
    return {"bf16": False, "fp16": False} if dtype == "fp32" else {dtype: True}


def arguments_in_place(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """As `trainer_arguments`, with `config` itself instead of its path, and None for DeepSpeed where it is not used."""
    return {"deepspeed": None, **trainer_arguments(settings, dict(config))}


def _as_named(config: Path | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """An absolute path for a path: another would depend on the folder in which training starts."""
    return os.path.abspath(config) if isinstance(config, Path) else config


def trainer_command_line(arguments: dict[str, Any]) -> str:
    """`arguments` on one line for a shell, with quoted values, to follow the name of a Trainer script."""
    words: list[str] = []
    for name, value in arguments.items():
        if (name, value) == _BARE:
            words.append(f"--{name}")
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        words += [f"--{name}", shlex.quote(text)]
    return " ".join(words)


def least_transformers(answer: Answer | Settings) -> str:
    """The first version of transformers that knows all of `trainer_arguments`; empty if every version does."""
    settings = settings_of(answer)
    way = settings.way_of_checkpointing
    since = [way.since] if way else []
    if _checkpointing_name(settings.transformers) == _NEWER_CHECKPOINTING:
        since.append(str(_NEWER_SINCE))
    return max(since, key=Version, default="")


def _checkpointing_name(transformers: str) -> str:
    """The switch's name. From 5.23 on the old name gives a warning, and 6 removes it; before, the new one fails."""
    try:
        return _NEWER_CHECKPOINTING if Version(transformers) >= _NEWER_SINCE else CHECKPOINTING
    except InvalidVersion:  # it is not installed, or its version number is not standard
        return CHECKPOINTING


def _optimizer(settings: Settings) -> dict[str, Any]:
    """The Trainer's name for the optimizer that was measured, unless that is a script's own."""
    return {} if settings.optimizer is None else OPTIMIZERS[settings.optimizer].trainer_arguments()
