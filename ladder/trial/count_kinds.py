"""Which blocks of a model are alike, so that each kind is run once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ladder.trial.count_modules import Row

Kinds = list[list[str]]
"""For each stack of blocks: a text for each block, which is the same for blocks that are alike."""


def kinds_of(stacks: Sequence[nn.ModuleList], config: Any) -> Kinds:
    """What makes each block what it is: its modules, their settings, and what `config` lists for each layer."""
    return [
        [f"{_described(block)} {_listed(config, place, len(stack))}" for place, block in enumerate(stack)]
        for stack in stacks
    ]


def _described(block: nn.Module) -> str:
    settings = [
        (name, type(module).__name__, [tuple(p.shape) for p in module.parameters(recurse=False)], _own(module))
        for name, module in block.named_modules()
    ]
    return repr(settings)


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """The settings of a module, but for its number."""
    plain = (bool, int, float, str, tuple, type(None))
    own = [(name, value) for name, value in vars(module).items() if isinstance(value, plain)]
    return [(name, value) for name, value in own if not any(part in name for part in _NUMBERS)]


_NUMBERS = ("idx", "index", "layer_id", "layer_number")
"""Parts of what models call the number of a layer."""


def _listed(config: Any, place: int, depth: int) -> list[Any]:
    lists = [value for value in vars(config).values() if isinstance(value, list | tuple) and len(value) == depth]
    return [value[place] for value in lists]


def cut_to_kinds(stacks: Sequence[nn.ModuleList], kinds: Kinds) -> dict[nn.Module, int]:
    """Shorten each stack to where it has had one block of each kind, and say for how many each block stands.

    The second block stands for the first's kind, since others read what a block has made, too.
    """
    times: dict[nn.Module, int] = {}
    for stack, own in zip(stacks, kinds, strict=True):
        number = Counter(own)
        places = {kind: own.index(kind) for kind in number}
        if own[:2].count(own[0]) == 2:
            places[own[0]] = 1
        del stack[max(places.values()) + 1 :]
        for place, block in enumerate(stack):
            times[block] = number[own[place]] if places[own[place]] == place else 0
    return times


def share_letters(rows: Iterable[Row], kinds: Kinds) -> None:
    """Give what was found of a block's modules to those of all blocks of its kind."""
    kind_of = [f"{number} {kind}" for number, stack in enumerate(kinds) for kind in stack]
    own = [row for row in rows if "layer" in row and row["kind"] == "linear"]
    found = {(kind_of[row["layer"]], _inside(row)): row for row in own if "reads" in row}
    for row in own:
        if (like := found.get((kind_of[row["layer"]], _inside(row)))) is not None:
            row |= {key: like[key] for key in ("reads", "is_kept") if key in like}


def _inside(row: Row) -> str:
    """The name of a module without the number of its block, which is the first."""
    parts = row["name"].split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[first + 1 :])
