"""Counts a model's parameters, and what its blocks do, without memory: of that which transformers builds from a config.

A program: it reads {"config": {…}, "task": "causal-lm" or null} from stdin and writes one JSON object to stdout:

    {"tasks": […], "sizes": {…}}    the tasks that the model can be trained for, and its sizes (`workload.counted`)
    {…, "uncounted": "…"}           likewise, without what a block does, as its code cannot be run without values
    {"tasks": []}                   transformers knows the model, but not as one of text
    {"failed": "…"}                 transformers does not know it, or cannot build it
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ladder.trial.count_block import counted_block
from ladder.trial.model_class import auto_class, model_config, tasks_of
from ladder.units import GIB
from ladder.workload.workload import Task

_ADDRESSES = 64 * GIB
"""Chosen: several times what importing torch maps. Some models compute a table on the host while they are built, which
a nonsensical configuration makes huge."""
_SECONDS = 30.0
"""To run the code of a model without values. Chosen: most take less than 2 s, one with 128 layers of experts 9."""
_SMALL_LIST = 0.1
"""A list of modules with less than this share of the largest one's parameters holds no blocks. Chosen: encoders have
more of the parameters of their decoders, and lists of heads or adapters have less."""
_GATES = {"gate_proj", "gate_up_proj", "w3", "wi_1"}
"""What models call the matrix that makes a feed-forward net a gated one."""
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "top_k")
"""What models call the number of experts that a token meets."""
_HEADS = ("num_attention_heads", "num_heads")
_STATES = ("state_size", "mamba_d_state", "ssm_state_size", "d_state", "lru_width", "linear_num_value_heads")
"""What models call the size of a state that goes from token to token."""
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "decoder_ffn_dim")


def counted(raw: dict[str, Any], task: Task | None) -> dict[str, Any]:
    """What this program writes for the configuration `raw`. Raises what transformers raises."""
    config = model_config(raw)
    tasks = tasks_of(config)
    if not tasks or (task is not None and task not in tasks):
        return {"tasks": tasks}
    with torch.device("meta"):
        model = auto_class(config, task or tasks[0]).from_config(config)
    sizes = _sizes(model, config)
    if sizes["is_recurrent"]:  # such code may go from token to token in Python
        return {"tasks": tasks, "sizes": sizes}
    try:
        with at_most(_SECONDS):
            blocks, positions = _blocks(model), sizes["max_positions"] or _number(config, "max_seq_len")
            model = model.to("meta", torch.bfloat16)
            sizes["block"] = counted_block(model, blocks, sizes["num_layers"], positions)
    except (Exception, TooLong) as error:  # whatever its code raises
        return {"tasks": tasks, "sizes": sizes, "uncounted": f"{type(error).__name__}: {error}"}
    return {"tasks": tasks, "sizes": sizes}


class TooLong(BaseException):
    """No code of a model catches it."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooLong in the body after `seconds`; in the main thread alone."""

    def end(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _sizes(model: PreTrainedModel, config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    blocks, parameters = _blocks(model), list(model.parameters())
    depth = _number(text, "num_hidden_layers", "num_layers") or len(blocks) or 1
    # ALBERT has a block for several layers, which a token goes through as often.
    times = depth // len(blocks) if blocks and depth % len(blocks) == 0 else 1
    shared = {p for block in blocks for p in block.parameters()} if times > 1 else set()
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    in_blocks = [sum(p.numel() for p in block.parameters() if p not in tables) for block in blocks]
    products = sum(
        number * (times if parameter in shared else 1) for parameter, number in _products(model, config, tables)
    )
    head = model.get_output_embeddings()
    tied = head is not None and head.weight in tables
    return {
        **_dimensions(text, model),
        "num_layers": times * len(blocks) or depth,
        "section": _section(config, text),
        "num_parameters": sum(p.numel() for p in parameters),
        "num_matmul_parameters": products + (head.weight.numel() if tied else 0),
        "num_block_parameters": max(in_blocks, default=sum(p.numel() for p in parameters) // depth),
        # Layers that share their parameters take none along when there are fewer of them.
        "num_parameters_in_blocks": 0 if shared else sum(in_blocks),
        "largest_parameter": max(p.numel() for p in parameters),
        "is_encoder_decoder": bool(config.is_encoder_decoder),
        "tied": tied,
        "fails_with_fsdp2": _fails_with_fsdp2(model),
        "checkpoints": bool(model.supports_gradient_checkpointing),
        "is_recurrent": _number(text, *_STATES) is not None or _number(text, *_HEADS) is None,
    }


def _fails_with_fsdp2(model: PreTrainedModel) -> bool:
    """Whether accelerate 1.15 would divide the same weights twice, which torch refuses or trains as two.

    Its units are the modules of the classes that the model names, then its embeddings and its head, which are one unit
    if they share their weights, and then the rest: https://github.com/huggingface/accelerate, `fsdp2_prepare_model`.
    """
    names, rest = set(model._no_split_modules or ()), id(model)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and embeddings is not None and head.weight is embeddings.weight
    units: dict[nn.Parameter, set[int]] = {}

    def visit(module: nn.Module, unit: int) -> None:
        if type(module).__name__ in names and module is not model:
            unit = id(module)
        of = {unit}
        if module is embeddings or module is head:  # its own unit, and that of a class if it lies within one
            of = {unit, id(head if tied else module)} - {rest}
        for parameter in module.parameters(recurse=False):
            units.setdefault(parameter, set()).update(of)
        for child in module.children():
            visit(child, unit)

    visit(model, rest)
    return any(len(each) > 1 for each in units.values())


def _dimensions(text: Any, model: PreTrainedModel) -> dict[str, Any]:
    """The sizes that predictions need, under the names of ModelShape."""
    hidden = _number(text, "hidden_size") or 0
    heads = _number(text, *_HEADS) or 1
    intermediate = _number(text, *_INTERMEDIATE) or (_number(text, "expand") or 4) * hidden
    shapes = {tuple(parameter.shape[-2:]) for parameter in model.parameters()}
    named = {part for name, _ in model.named_parameters() for part in name.split(".")}
    double = {(2 * intermediate, hidden), (hidden, 2 * intermediate)}
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "num_kv_heads": _number(text, "num_key_value_heads") or heads,
        "head_dim": _number(text, "head_dim", "d_kv") or max(1, hidden // heads),
        "vocab_size": _number(text, "vocab_size") or 0,
        "max_positions": _positions(text, model),
        "gated_mlp": bool(named & _GATES) or bool(shapes & double),
    }


def _positions(text: Any, model: PreTrainedModel) -> int | None:
    """The longest sequence. Some families, as roberta, count positions from after the padding token's."""
    positions = _number(text, "max_position_embeddings")
    for name, module in model.named_modules():
        if positions and name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(positions - module.padding_idx - 1)
    return positions


def _number(config: Any, *names: str) -> int | None:
    """The first of `names` that `config` has as a number above zero; of one for each layer, the largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            return int(max(value))
        if type(value) is int and value > 0:
            return value
    return None


def _section(config: Any, text: Any) -> str:
    """The key of `config` under which the language model's sizes are; "" if they are at the top."""
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), "")


def _text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
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


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The language model's blocks, of encoder and decoder together."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in _text_modules(model):
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(f"{outer}." for outer in lists)):
            lists[name] = module
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()}
    least = _SMALL_LIST * max(sizes.values(), default=0)
    return [block for name, module in lists.items() if sizes[name] > least for block in module]


def _products(model: PreTrainedModel, config: Any, tables: set[Any]) -> Iterator[tuple[Any, int]]:
    """The matrices, with how many of their elements a token is multiplied with: of experts, the active ones."""
    active = _number(config.get_text_config(), *_ACTIVE_EXPERTS)
    seen: set[Any] = set()
    for prefix, module in _text_modules(model):
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.dim() < 2 or parameter in tables or parameter in seen:
                continue
            seen.add(parameter)
            share = 1.0
            if active is not None and "experts" in (parts := name.split(".")):
                share = min(1.0, active / _experts(model, parts, parameter))
            yield parameter, round(parameter.numel() * share)


def _experts(model: PreTrainedModel, parts: list[str], parameter: Any) -> int:
    """How many experts `parameter` is one of, or holds: all may be in one tensor."""
    place = parts.index("experts")
    if parts[place + 1].isdigit():
        return len(list(model.get_submodule(".".join(parts[: place + 1])).children()))
    return int(parameter.shape[0]) if parameter.dim() == 3 else 1


def main() -> int:
    """Count what stdin asks for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the controller handles Ctrl-C
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _ADDRESSES if hard == resource.RLIM_INFINITY else min(_ADDRESSES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    asked = json.load(sys.stdin)
    answers, sys.stdout = os.dup(1), sys.stderr  # transformers may print
    try:
        reply = counted(asked["config"], asked["task"])
    except Exception as error:
        reply = {"failed": f"{type(error).__name__}: {error}"}
    os.write(answers, json.dumps(reply).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
