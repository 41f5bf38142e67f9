"""Which transformers class a config.json is trained with, and for which tasks there is one."""

from __future__ import annotations

import math
from typing import Any, get_args

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from ladder.workload.workload import Task

_AUTO_CLASSES: dict[Task, tuple[Any, ...]] = {
    # A model of images and text is trained on text alone: most of its memory is its language model's.
    "causal-lm": (AutoModelForCausalLM, AutoModelForImageTextToText),
    "masked-lm": (AutoModelForMaskedLM,),
    "seq2seq-lm": (AutoModelForSeq2SeqLM,),
}

_LEFT_OUT = ("model_type", "torch_dtype", "dtype", "auto_map")
"""The workload decides on the dtype, and `auto_map` would have transformers ask for code from a repository."""


def model_config(raw: dict[str, Any]) -> Any:
    """A transformers configuration from the raw config.json. ValueError if transformers does not know its type."""
    fields = {key: _decoded(value) for key, value in raw.items() if key not in _LEFT_OUT}
    config = AutoConfig.for_model(raw["model_type"], **fields)
    text = config.get_text_config()
    text.use_cache = config.use_cache = False
    # A model with a smaller vocabulary, for a short trial, may have none for what its class pads with by default.
    if (getattr(text, "pad_token_id", None) or 0) >= (getattr(text, "vocab_size", None) or math.inf):
        text.pad_token_id = None
    return config


def of_dtype(config: Any, dtype: Any) -> dict[str, Any]:
    """The argument of `from_config` for weights of this type, whose name was another before transformers 4.56."""
    return {"dtype" if hasattr(config, "dtype") else "torch_dtype": dtype}


def auto_class(config: Any, task: Task) -> Any:
    """transformers' automatic class that builds the model of `config` for `task`. KeyError if there is none."""
    for auto in _AUTO_CLASSES[task]:
        if type(config) in auto._model_mapping:
            return auto
    raise KeyError(f"transformers has no class of {config.model_type!r} for {task}")


def import_model(raw: dict[str, Any], task: Task) -> None:
    """Import the module of the model's class. KeyError if there is none."""
    config = model_config(raw)
    auto_class(config, task)._model_mapping[type(config)]


def tasks_of(config: Any) -> list[Task]:
    """The tasks that `config` can be trained for, the usual one first; empty for a model of anything but text."""
    possible = [task for task in get_args(Task) if _has_class(config, task)]
    return sorted(possible, key=lambda task: task != _usual_task(config, possible))


def _has_class(config: Any, task: Task) -> bool:
    if (task == "seq2seq-lm") != bool(config.is_encoder_decoder):
        return False
    return any(type(config) in auto._model_mapping for auto in _AUTO_CLASSES[task])


def _usual_task(config: Any, possible: list[Task]) -> Task | None:
    """An encoder has a class for both tasks: without a decoder's architecture it predicts masked tokens."""
    named = [str(name) for name in config.architectures or []]
    is_decoder = getattr(config, "is_decoder", False) or any(name.endswith(("CausalLM", "LMHead")) for name in named)
    if "masked-lm" in possible and not is_decoder:
        return "masked-lm"
    return next(iter(possible), None)


def _decoded(value: Any) -> Any:
    """`value` with the floats that transformers writes as {"__float__": "Infinity"}, as JSON has none for them."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value
