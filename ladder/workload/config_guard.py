"""Validates a config.json, which is untrusted data, and leaves out or refuses keys that would run code of others.

Every error is a ModelNotAccessibleError with one short sentence that names the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ladder.errors import ModelNotAccessibleError

_LARGEST_DIMENSION = 10_000_000
"""Chosen: several times any known vocabulary or width, and small enough for products of two."""
_MOST_LAYERS = 10_000
"""Chosen: many times any known model; with more, computing the shape would take long."""
_MOST_NESTED = 32
"""Chosen: several times what any configuration needs, and far from Python's limit of recursion."""

OWN_CODE_NOTE = "The model's own code is not used: transformers' own class is."
"""What `checked_config` notes of a model that brings code. Where transformers has no such class, it cannot be tuned."""
# Keys that would make transformers run such code. What is left is the configuration of a class of transformers.
_OWN_CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")
# Keys that make transformers download and run kernels.
_CODE_KEYS = ("use_kernels", "kernel_config")
# Keys that make the vision part of a model download weights when it is built.
_WEIGHT_KEYS = ("use_pretrained_backbone", "use_timm_backbone")
_IMPLEMENTATION_KEY = re.compile(r"_?(attn|experts)_implementation(_internal)?")
# These are part of torch and transformers. All others, even flash_attention_2, may download a kernel from the Hub.
_BUILT_IN_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
# Keys without influence on the shape: where the file came from, and a dtype, which the workload decides.
_IGNORED_KEYS = ("_name_or_path", "name_or_path", "torch_dtype", "dtype")
# Packed weights by their quant_method, with the class of transformers whose `dequantize` unpacks them to 16 bits.
_UNPACKED_BY = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config", "mxfp8": "FineGrainedFP8Config"}
_OTHER_HEAD = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|RewardModel)")


def shorten(value: object, length: int = 60) -> str:
    """Any `value` as text for a message: escaped, and cut to `length` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}…"


def checked_config(config: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """A copy of `config` with which transformers downloads and runs nothing, and a note on what was left out, or "".

    ModelNotAccessibleError, which names the key, if a key at any depth would run code from a repository, or if the
    model cannot be fully fine-tuned.
    """
    notes: list[str] = []
    clean: dict[str, Any] = _cleaned(config, name, notes, _MOST_NESTED)
    if other := [each for each in _texts(clean.get("architectures")) if _OTHER_HEAD.search(each)]:
        said = f"The model is tuned as a language model, and not as {shorten(other[0])}"
        notes.append(f"{said}: for that, give your training script behind `--`.")
    return clean, " ".join(filter(None, dict.fromkeys(notes)))


def _cleaned(value: Any, name: str, notes: list[str], depth: int) -> Any:
    if depth == 0:
        raise ModelNotAccessibleError(f"The configuration of {shorten(name)} cannot be used: it is nested too deeply.")
    if isinstance(value, list):
        return [_cleaned(item, name, notes, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    clean = {}
    for key, item in value.items():
        _check_key(key, item, name)
        left_out = _left_out(key, item)
        if left_out is not None:
            notes.append(left_out)
            continue
        clean[key] = _cleaned(item, name, notes, depth - 1)
        if _IMPLEMENTATION_KEY.fullmatch(key) and not set(_texts(item)) <= set(_BUILT_IN_IMPLEMENTATIONS):
            del clean[key]
            notes.append(f"The model's {key} {shorten(item)} is not used: trials use transformers' default.")
    return clean


def _check_key(key: str, item: Any, name: str) -> None:
    refusal = f"The configuration of {shorten(name)} is refused: its {key}"
    if key in _CODE_KEYS and item:
        raise ModelNotAccessibleError(f"{refusal} would run code from a model repository, which ladder never does.")
    if key in _WEIGHT_KEYS and item:
        raise ModelNotAccessibleError(f"{refusal} would download weights, which ladder never does.")
    if _IMPLEMENTATION_KEY.fullmatch(key) and any("/" in text for text in _texts(item)):
        raise ModelNotAccessibleError(f"{refusal} names a kernel repository, whose code ladder never runs.")
    if key == "quantization_config" and item is not None and _unpacked_by(item) is None:
        bits = "8bit" if isinstance(item, dict) and item.get("load_in_8bit") is True else "4bit"
        raise ModelNotAccessibleError(
            f"{refusal} says that its weights are quantised, which cannot be trained; give the original model's folder "
            f"or Hub id, and for adapters beside quantised weights add --lora r=16 --load-in {bits}."
        )


def _left_out(key: str, item: Any) -> str | None:
    """What to note of a `key` that transformers does not get, or "" if nothing; None for one that it gets."""
    if key in _OWN_CODE_KEYS:
        return OWN_CODE_NOTE if item else ""
    if key in _IGNORED_KEYS or (key.endswith("_config") and item is None):  # a section that is null is absent
        return ""
    if key != "quantization_config":
        return None
    return (
        f"The model is trained in 16 bits and without --load-in: your training unpacks its {item['quant_method']} "
        f"weights with quantization_config={_unpacked_by(item)}(dequantize=True)."
    )


def _unpacked_by(quantization: Any) -> str | None:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return _UNPACKED_BY.get(method) if isinstance(method, str) else None


def _texts(value: Any) -> list[str]:
    """The leaves of `value` that are not None, as text. Not recursive, because the depth is not checked yet."""
    leaves, rest = [], [value]
    while rest:
        item = rest.pop()
        if isinstance(item, dict | list):
            rest.extend(item.values() if isinstance(item, dict) else item)
        elif item is not None:
            leaves.append(str(item))
    return leaves


class ConfigReader:
    """Reads an untrusted config.json; every error is a ModelNotAccessibleError that names the key."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def refuse(self, problem: str) -> ModelNotAccessibleError:
        return ModelNotAccessibleError(f"The configuration of {self.name!r} cannot be used: {problem}.")

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = _LARGEST_DIMENSION) -> int:
        """The first of `keys` that is set, as a number from `least` to `most`."""
        key = next((key for key in keys if self.config.get(key) is not None), None)
        if key is None:
            if default is None:
                raise self.refuse(f"{keys[0]} is missing")
            return default
        value = self.config[key]
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(f"{key} is {shorten(value)}, not a whole number from {least} to {most}")
        return value

    def layers(self, *keys: str) -> int:
        return self.size(*keys, most=_MOST_LAYERS)

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(f"{key} is {shorten(value)}, not true or false")
        return value
