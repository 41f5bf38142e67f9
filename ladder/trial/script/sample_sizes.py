"""How much there is of a sample, which orders samples by length."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sized
from numbers import Number
from typing import Any

import torch

_LOOKED_AT = 8
"""Members of a list that are looked at for pictures. Chosen: they are mostly alike."""
_DIMENSIONS_OF_TEXT = 2
"""Of an array in a sample. Chosen: height, width and colours of an image make three."""


def holds_pictures(sample: Any) -> bool:
    """Whether there is more in it than texts and numbers, whose count says how long it is."""
    if isinstance(sample, Mapping):
        return any(str(name).startswith("pixel") or holds_pictures(each) for name, each in sample.items())
    if isinstance(sample, list | tuple):
        return any(holds_pictures(each) for each in sample[:_LOOKED_AT])
    if hasattr(sample, "shape"):
        return len(sample.shape) > _DIMENSIONS_OF_TEXT
    return not (sample is None or isinstance(sample, str | Number))


def arrow_lengths(source: Any) -> list[int] | None:
    """Of all samples of a `datasets.Dataset` whose columns are lists of numbers, at once; else None."""
    datasets = sys.modules.get("datasets")  # a script that has one has imported it
    if datasets is None or not isinstance(source, datasets.Dataset):
        return None
    lists = [name for name, feature in source.features.items() if _is_list_of_numbers(feature)]
    if not lists or getattr(source, "_format_type", None) == "custom" or (len(source) and holds_pictures(source[0])):
        return None
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    table = source.with_format("arrow")[:]
    columns = [pc.fill_null(pc.list_value_length(table[name]), 0).to_pylist() for name in lists]
    return [max(sum(each), 1) for each in zip(*columns, strict=True)]


def _is_list_of_numbers(feature: Any) -> bool:
    kind = getattr(getattr(feature, "feature", None), "dtype", None)
    return isinstance(kind, str) and kind.startswith(("int", "uint", "float", "bool"))


def size_of(value: Any) -> int:
    """Numbers of an array or a list, letters of a text, and the sum of these in a mapping."""
    if torch.is_tensor(value) or hasattr(value, "shape"):
        size = 1
        for length in value.shape:
            size *= int(length)
        return size
    if isinstance(value, Mapping):
        return max(1, sum(size_of(each) for each in value.values()))
    if isinstance(value, str):
        return len(value)
    if is_sequence(value):
        return sum(size_of(each) if isinstance(each, Mapping | list | tuple) else 1 for each in value)
    return 0


def is_sequence(value: Any) -> bool:
    """Whether it is a list, a tuple or the like, and neither a text nor a mapping."""
    return isinstance(value, Sized) and isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
