"""A model's parts: the modules that tokens go through, blocks and which are alike, matrices, positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ladder.trial.count_modules import Row

_SMALL_LIST = 0.1
"""A list of modules with less than this share of the largest one's parameters holds no blocks. Chosen: encoders have
more of the parameters of their decoders, and lists of heads or adapters have less."""
ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "top_k")
"""What models call the number of experts that a token meets."""
_LENGTHS = ("position", "seq_len", "n_ctx", "seq_length")
"""Parts of what models call the length of their table of positions."""
_SOFT_LENGTHS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions")
_SPARE_ROWS = 4
"""A table of positions has at most so many rows more than it has positions. Chosen: OPT and BART have two."""


def positions_of(text: Any, model: PreTrainedModel) -> tuple[int | None, int | None]:
    """The longest sequence that has positions in a table, and the longest that others were made for.

    The table may be one of embeddings or of numbers. Some models, as RoBERTa, count from after the padding token's.
    """
    named = {name: value for name, value in vars(text).items() if any(part in name for part in _LENGTHS)}
    lengths = {value for value in named.values() if type(value) is int and value > 1}
    inputs = model.get_input_embeddings()
    for _, module in text_modules(model):
        tables = [each for each in module.buffers(recurse=False) if each.dim() > 1]
        tables += [module.weight] if isinstance(module, nn.Embedding) and module is not inputs else []
        for table in tables:
            if found := [each for each in lengths if any(0 <= side - each <= _SPARE_ROWS for side in table.shape)]:
                padding = getattr(module, "padding_idx", None)
                reserved = 0 if padding is None or max(table.shape) > max(found) else padding + 1
                return max(found) - reserved, None
    made_for = number_in(text, *_SOFT_LENGTHS)
    scaling = getattr(text, "rope_parameters", None) or {}
    if made_for is not None and scaling.get("original_max_position_embeddings") == made_for:
        made_for = round(made_for * (scaling.get("factor") or 1.0))
    return None, made_for


def number_in(config: Any, *names: str) -> int | None:
    """The first of `names` that `config` has as a number above zero; of one for each layer, the largest."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # each layer has its own, says an error that derives from nothing more
            continue
        if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            return int(max(value))
        if type(value) is int and value > 0:
            return value
    return None


def text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules that tokens go through, with their names: all but those of images, sound and the like."""
    own = {type(model.config), type(model.config.get_text_config())}
    towers = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and type(module.config) not in own
    ]
    for name, module in model.named_modules():
        if not f"{name}.".startswith(tuple(towers)):
            yield name, module


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The language model's blocks, of encoder and decoder together."""
    return [block for blocks in stacks_of(model) for block in blocks]


def stacks_of(model: PreTrainedModel) -> list[nn.ModuleList]:
    """Its stacks of blocks."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in text_modules(model):
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(f"{outer}." for outer in lists)):
            lists[name] = module
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    least = _SMALL_LIST * max(sizes.values(), default=0)
    return [module for name, module in lists.items() if sizes[name] > least]


def shares_of(model: PreTrainedModel, config: Any) -> dict[nn.Parameter, float]:
    """The matrices that tokens are multiplied with, and the share of the tokens: of experts, the active ones."""
    active = number_in(config.get_text_config(), *ACTIVE_EXPERTS)
    seen = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    shares: dict[nn.Parameter, float] = {}
    for prefix, module in text_modules(model):
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.dim() < 2 or parameter in seen or parameter in shares:
                continue
            experts = _experts(model, module, name, parameter)
            shares[parameter] = min(1.0, active / experts) if active and experts > 1 else 1.0
    return shares


def _experts(model: PreTrainedModel, module: nn.Module, name: str, parameter: nn.Parameter) -> int:
    """How many experts `parameter` is one of, or holds: all may be in one tensor."""
    if parameter.dim() == 3 and not isinstance(module, nn.Conv1d):
        return int(parameter.shape[0])
    outer, _, number = name.rpartition(".experts.")
    if outer and number.split(".")[0].isdigit():
        return len(list(model.get_submodule(f"{outer}.experts").children()))
    return 1


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
