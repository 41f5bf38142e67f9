"""The modules of a model, as its own classes have them: what adapters, quantisation and freezing can name.

`ladder.trial.count` lists them; a list holds those that differ in numbers alone, as the layers of a stack, once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ladder.workload.workload import ModelShape


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module with parameters of its own, or one tensor that holds all experts' matrices."""

    name: str
    kind: Literal["linear", "experts", "table", "head", "conv", "other"]
    elements: int
    """Of all its parameters, biases included, that no module before it has: 0 for a head that is the table."""
    still: int = 0
    """Of these that the model's own code does not train, as a table of sines."""
    inputs: int = 0
    outputs: int = 0
    """The sides of its matrix, or of each expert's; 0 if it has none."""
    count: int = 1
    """Matrices in one tensor: one per expert."""
    share: float = 1.0
    """The share of the tokens that each matrix sees: an expert gets few of them."""
    layer: int | None = None
    """The number of its block; None outside the blocks that tokens go through."""
    packs: bool = False
    """Quantisation packs its matrix."""
    adapter: int = 0
    """Elements for each rank that peft's "all-linear" adds beside it."""
    adapted: int = 0
    """Elements that peft trains of it by the adapters that it was asked about; 0 if it was asked about none."""
    copied: int = 0
    """Of its copy that these train as a whole."""
    reads: str = ""
    """What its input is: modules of a block that read the same tensor have the same text."""
    is_kept: bool = False
    """Its input is kept for backward even where all weights are frozen."""
    also: tuple[str, ...] = ()
    """Names of others that share its parameters."""

    @property
    def size(self) -> int:
        """Elements of its matrices."""
        return self.count * self.inputs * self.outputs

    @property
    def takes_adapters(self) -> bool:
        """peft finds it by its name."""
        return self.kind in ("linear", "head", "table", "conv")

    @property
    def last_name(self) -> str:
        return self.name.rsplit(".", 1)[-1]


def expanded(rows: Iterable[Mapping[str, Any]]) -> tuple[Module, ...]:
    """The modules that `rows`, as `ladder.trial.count_modules` compacts them, stand for. TypeError for other rows."""
    return tuple(module for row in rows for module in _expanded(dict(row)))


def _expanded(row: dict[str, Any]) -> Iterator[Module]:
    places, first = row.pop("at", []), row.pop("layer", None)
    row["also"] = tuple(row.get("also", ()))
    if not places:
        yield Module(**row, layer=first)
        return
    parts = row.pop("name").split("*")
    for numbers in itertools.product(*(_values(ranges) for ranges in places)):
        name = "".join(itertools.chain(*itertools.zip_longest(parts, map(str, numbers), fillvalue="")))
        yield Module(**row, name=name, layer=None if first is None else first + numbers[0])


def _values(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [value for first, last in ranges for value in range(first, last + 1)]


def with_fewer_layers(rows: Iterable[Mapping[str, Any]], most: int) -> tuple[Mapping[str, Any], ...]:
    """`rows` of the same model with at most `most` layers in each stack of blocks.

    Layers of a second stack come after those of the first.
    """
    rows = tuple(rows)
    stacks = sorted({row["layer"] for row in rows if "layer" in row})
    kept = []
    for row in rows:
        if "layer" not in row:
            kept.append(row)
            continue
        ranges = [[first, min(last, most - 1)] for first, last in row["at"][0] if first < most]
        if ranges:
            place = most * stacks.index(row["layer"])
            kept.append({**row, "at": [ranges, *row["at"][1:]], "layer": place})
    return tuple(kept)


@dataclass(frozen=True)
class Product:
    """`count` products of the hidden values of `tokens` of a micro-batch's tokens with a matrix of this size."""

    inputs: int
    outputs: int
    count: int
    tokens: float = 1.0
    """The share of the tokens that each matrix sees: an expert gets few of them."""


def multiplied(modules: Iterable[Module]) -> list[Module]:
    """Those that a token is multiplied with."""
    return [each for each in modules if each.kind in ("linear", "experts", "head") and each.size and each.share]


def products_of(model: ModelShape) -> tuple[Product, ...]:
    """The matrix products of one forward pass, those of the same size together."""
    counted = Counter[tuple[int, int, float]]()
    for each in multiplied(model.modules):
        counted[each.inputs, each.outputs, each.share] += each.count
    return tuple(Product(inputs, outputs, number, share) for (inputs, outputs, share), number in counted.items())
