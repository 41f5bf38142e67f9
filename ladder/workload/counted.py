"""The shape of a model whose parameters transformers' own class has counted, and that model with fewer layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ladder.errors import ModelNotAccessibleError, UsageError
from ladder.workload.config_guard import shorten
from ladder.workload.workload import CountedBlock, ModelShape, Source, Task


@dataclass(frozen=True)
class Counted:
    """What `ladder.trial.count` found of a configuration."""

    tasks: tuple[Task, ...]
    """Those that the model can be trained for, the usual one first; none for a model of anything but text."""
    sizes: Mapping[str, Any] | None
    """Fields of ModelShape, and `is_recurrent`; None if the model cannot be trained for the task that was asked for."""


Count = Callable[[Mapping[str, Any], Task | None], Counted | None]
"""Counts the model of a checked configuration for a task, or for its usual one; None if that does not work here."""


def shape_of_counted(
    config: Mapping[str, Any], counted: Counted, *, name: str, source: Source, task: Task | None, note: str = ""
) -> ModelShape:
    """The shape of the model of `config` with the sizes in `counted`.

    ModelNotAccessibleError if it is no model of text, UsageError if it cannot be trained for `task`.
    """
    model_type = config["model_type"]
    if not counted.tasks:
        raise ModelNotAccessibleError(
            f"{shorten(name)} cannot be trained here: transformers has no class for {shorten(model_type)} that learns "
            "text (causal-lm, masked-lm or seq2seq-lm); name a language model."
        )
    if counted.sizes is None:
        possible = " or ".join(counted.tasks)
        raise UsageError(f"A {shorten(model_type)} model is trained as {possible}, not as {task}; leave --task out.")
    sizes = dict(counted.sizes)
    block = sizes.pop("block", None)
    if sizes.pop("is_recurrent"):
        note = f"{note} {shorten(model_type)} has layers with a state, whose memory is first predicted as if they were "
        note += "attention; trials measure it."
    elif block is None:
        note = f"{note} What a layer of {shorten(model_type)} does could not be counted, so its memory and speed are "
        note += "first predicted as a usual layer's; trials measure them."
    fields = {"config": dict(config), "model_type": model_type, "task": task or counted.tasks[0]}
    own = CountedBlock(**block) if block else None
    return ModelShape(name=name, source=source, note=note.strip(), block=own, **fields, **sizes)


def scaled(shape: ModelShape, config: Mapping[str, Any], num_layers: int, vocab_size: int) -> ModelShape:
    """`shape` with `num_layers` of its layers and `vocab_size` tokens, whose configuration is `config`.

    The counts are an estimate where layers differ, as they take the mean, and where embeddings are narrow. Probes use
    them, and no user sees them.
    """
    left = num_layers / shape.num_layers
    table = shape.vocab_size * shape.hidden_size
    fewer_tokens = (shape.vocab_size - vocab_size) * shape.hidden_size
    gone = round(shape.num_parameters_in_blocks * (1 - left)) + fewer_tokens * (1 if shape.tied else 2)
    products = max(0, shape.num_matmul_parameters - table)
    changes = {
        "config": dict(config),
        "num_layers": num_layers,
        "vocab_size": vocab_size,
        "num_parameters": max(1, shape.num_parameters - gone),
        "num_parameters_in_blocks": round(shape.num_parameters_in_blocks * left),
        "num_matmul_parameters": round(products * left) + table - fewer_tokens,
    }
    return ModelShape(**vars(shape) | changes)
