"""The modules of a model that have parameters: names, sizes, and what adapters and quantisation do with them.

The answers are those of the classes that transformers builds, of peft and of the rule of bitsandbytes.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Row = dict[str, Any]
"""The fields of `workload.modules.Module`, without those that have their default."""


def rows_of(
    model: PreTrainedModel, texts: set[str], blocks: Sequence[nn.Module], share: Mapping[nn.Parameter, float]
) -> list[Row]:
    """A row for each module of `model`, which is on the meta device; tokens go through those named in `texts`.

    `blocks` are its blocks, and `share` has the tokens' share that each of their matrices sees. Parameters count for
    the first module that has them, which names those that share them.
    """
    layers = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    head = model.get_output_embeddings()
    heads = [name for name, module in model.named_modules() if module is head]
    rows, owner = [], dict[nn.Parameter, Row]()
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for row, parameters in _of_module(name, module, own, share, is_head=module is head):
            for shared in parameters:
                if shared in owner:
                    owner[shared].setdefault("also", []).append(name)
                    row["elements"] -= shared.numel()
                elif not shared.requires_grad:
                    row["still"] = row.get("still", 0) + shared.numel()
            if id(module) in layers:
                row["layer"] = layers[id(module)]
            if name not in texts:
                row["share"] = 0.0
            if any(name.endswith(f".{each}") for each in heads):
                row.pop("packs", None)  # transformers leaves out what has the head's name, wherever it is
            owner = dict.fromkeys(parameters, row) | owner
            rows.append(row)
    return rows


def _of_module(
    name: str, module: nn.Module, own: Mapping[str, nn.Parameter], share: Mapping[nn.Parameter, float], *, is_head: bool
) -> Iterator[tuple[Row, list[nn.Parameter]]]:
    """The rows of one module with its `own` parameters: one, and one for each tensor that holds all experts'."""
    rest = dict(own)
    experts = {
        each: parameter for each, parameter in own.items() if parameter.dim() == 3 and share.get(parameter, 1) < 1
    }
    for place, (each, parameter) in enumerate(experts.items()):
        inputs, outputs = _sides_of_experts(list(experts.values()), place)
        row = _row(f"{name}.{each}", "experts", inputs, outputs, parameter.numel())
        row["reads"] = "n" if place == 0 else "f"
        yield row | {"count": parameter.shape[0], "share": share[parameter]}, [parameter]
        del rest[each]
    if not rest:
        return
    kind, inputs, outputs = _kind_of(module, rest, is_head=is_head)
    row = _row(name, kind, inputs, outputs, sum(parameter.numel() for parameter in rest.values()))
    if (weight := rest.get("weight")) is not None and share.get(weight, 1) < 1:
        row["share"] = share[weight]
    if not is_head and packs(module):
        row["packs"] = True
    yield row, list(rest.values())


def packs(module: nn.Module) -> bool:
    """Whether bitsandbytes takes the module's class, as it takes none derived from torch's, unless it is the head.

    The rule is that of `transformers.integrations.bitsandbytes`.
    """
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _row(name: str, kind: str, inputs: int, outputs: int, elements: int) -> Row:
    return {"name": name, "kind": kind, "inputs": inputs, "outputs": outputs, "elements": elements}


def _kind_of(module: nn.Module, own: Mapping[str, nn.Parameter], *, is_head: bool) -> tuple[str, int, int]:
    """What a module is to a token, with its inputs and outputs; 0 if it is no matrix."""
    weight = own.get("weight")
    if weight is not None and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "conv", weight[0].numel(), weight.shape[0]
    if weight is None or weight.dim() != 2:
        return "other", 0, 0
    if isinstance(module, nn.Embedding):
        return "table", *weight.shape
    inputs, outputs = weight.shape if isinstance(module, Conv1D) else reversed(weight.shape)
    return ("head" if is_head else "linear"), inputs, outputs


def _sides_of_experts(experts: Sequence[nn.Parameter], place: int) -> tuple[int, int]:
    """Inputs and outputs of the tensor at `place`: all read and write values of the width that both have in common."""
    sides = experts[place].shape[1:]
    common = set(sides).intersection(*(each.shape[1:] for each in experts))
    width = min(common, default=sides[0])
    other = sides[0] if sides[1] == width else sides[1]
    is_last = place == len(experts) - 1 and len(experts) > 1
    return (other, width) if is_last else (width, other)


def name_what_they_read(rows: Iterable[Row], model: nn.Module, inputs: Mapping[nn.Module, tuple[int, bool]]) -> None:
    """Say in `rows` what the layers of blocks read: a letter for each tensor, in the order of `inputs`.

    "a" is what attention reads, "q" what comes from it, "n" what the feed-forward net reads, and "f" what is inside it,
    as far as a block has these; more have numbers.
    """
    names = {module: name for name, module in model.named_modules()}
    of_name = {row["name"]: row for row in rows if row["kind"] == "linear" and "layer" in row}
    blocks: dict[int, dict[int, list[Row]]] = {}
    for module, (storage, is_kept) in inputs.items():
        if (row := of_name.get(names[module])) is not None:
            blocks.setdefault(row["layer"], {}).setdefault(storage, []).append(row)
            if is_kept:
                row["is_kept"] = True
    with_experts = {row["layer"] for row in rows if row["kind"] == "experts" and "layer" in row}
    for layer, tensors in blocks.items():
        for place, readers in enumerate(tensors.values()):
            is_inner = place == len(tensors) - 1 > 1 and readers[0]["inputs"] >= readers[0]["outputs"]
            letter = "f" if is_inner and layer not in with_experts else "aqn"[place] if place < 3 else f"n{place}"
            for row in readers:
                row["reads"] = letter


def add_adapters(rows: Iterable[Row], model: PreTrainedModel) -> None:
    """Say in `rows` how many elements for each rank peft's "all-linear" adds; nothing where peft is missing."""
    try:
        added, _ = _trained_by_peft(model, {"r": 1, "target_modules": "all-linear"})
    except ImportError:
        return
    for row in rows:
        if found := added.get(row["name"]):
            row["adapter"] = found


def add_asked_adapters(rows: Iterable[Row], model: PreTrainedModel, lora: Mapping[str, Any]) -> None:
    """Say in `rows` how many elements peft trains by `lora`, arguments of LoraConfig. Raises what peft does."""
    added, copied = _trained_by_peft(model, lora)
    for row in rows:
        for key, found in (("adapted", added), ("copied", copied)):
            if row["name"] in found:
                row[key] = found[row["name"]]


def _trained_by_peft(model: PreTrainedModel, lora: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """By name of a row: the elements of adapters, and those of copies that are trained as a whole."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**lora))
    added, copied = dict[str, int](), dict[str, int]()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            of = copied if _COPY in name else added
            # What wraps a parameter, and not a layer, has its module's name, and a layer more for each that it wraps.
            of[_place(name)] = of.get(_place(name), 0) + parameter.numel()
    return added | dict(_of_parameters(adapted)), copied


_COPY = ".modules_to_save.default"
"""peft puts it between the name of a module that it copies and those of its parameters."""


def _place(name: str) -> str:
    """The name in the model of the module that peft's parameter `name` is beside, or a copy of."""
    name = name.removeprefix("base_model.model.").replace(_COPY, "")
    cut = re.split(r"\.lora_|\.token_adapter", name)
    return cut[0].replace(".base_layer", "") if len(cut) > 1 else name.replace(".base_layer", "").rpartition(".")[0]


def _of_parameters(adapted: nn.Module) -> Iterator[tuple[str, int]]:
    """The names of parameters that have adapters themselves, and the elements of these."""
    for name, module in adapted.named_modules():
        if wrapped := getattr(module, "parameter_name", None):
            own = [p for each, p in module.named_parameters() if each.startswith(("lora_A", "lora_B"))]
            place = name.removeprefix("base_model.model.").replace(".base_layer", "")
            yield f"{place}.{wrapped}", sum(p.numel() for p in own)


def compacted(rows: Sequence[Row]) -> list[Row]:
    """`rows` with those that differ in numbers of their names alone put together.

    Each number of a name is a `*` then, and `at` lists for each of these the ranges of its values. `layer` is then that
    of the number 0.
    """
    groups: dict[str, list[tuple[tuple[int, ...], Row]]] = {}
    for row in rows:
        parts = row["name"].split(".")
        numbers = tuple(int(part) for part in parts if part.isdigit())
        starred = _starred(row, numbers)
        groups.setdefault(json.dumps(starred, sort_keys=True), []).append((numbers, starred))
    return [each for group in groups.values() for each in _ranged(group)]


def _starred(row: Row, numbers: tuple[int, ...]) -> Row:
    if not numbers:
        return row
    starred = row | {"name": ".".join("*" if part.isdigit() else part for part in row["name"].split("."))}
    if "layer" in row:
        starred["layer"] = row["layer"] - numbers[0]
    return starred


def _ranged(group: Sequence[tuple[tuple[int, ...], Row]]) -> Iterator[Row]:
    """`group` as one row if its numbers are all combinations of some values, or else one for each first number."""
    row, places = group[0][1], [numbers for numbers, _ in group]
    if not places[0]:
        yield from (each for _, each in group)
        return
    values = [sorted(set(column)) for column in zip(*places, strict=True)]
    if prod(map(len, values)) == len(places):
        yield row | {"at": [_ranges(column) for column in values]}
        return
    for first in values[0]:
        own = [numbers for numbers in places if numbers[0] == first]
        rest = [sorted(set(column)) for column in zip(*own, strict=True)]
        yield row | {"at": [_ranges(column) for column in rest]}


def _ranges(values: Sequence[int]) -> list[list[int]]:
    """Consecutive numbers as pairs of the first and the last."""
    runs = groupby(enumerate(values), key=lambda pair: pair[1] - pair[0])
    found = [[value for _, value in run] for _, run in runs]
    return [[run[0], run[-1]] for run in found]
