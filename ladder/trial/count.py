"""Counts a model's parameters, and what its blocks do, without memory: of that which transformers builds from a config.

A program: it reads {"config": {…}, "task": "causal-lm" or null, "replacing": {…}} from stdin, where `replacing` has the
modules of techniques that replace kernels, by their names, and perhaps adapters as "lora", with the arguments of peft's
LoraConfig. It writes one JSON object to stdout:

    {"tasks": […], "sizes": {…}}    the tasks that the model can be trained for, and its sizes (`workload.counted`)
    {…, "uncounted": "…"}           likewise, without what a block does, as its code cannot be run without values
    {…, "refused": "…"}             likewise, without the adapters, which peft does not take
    {"tasks": []}                   transformers knows the model, but not as one of text
    {"unknown": […]}                transformers does not know its type, but types that are written alike
    {"failed": "…"}                 transformers cannot build it
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from ladder.trial.count_block import Blocks, counted_blocks, kept_in_32_bits, length_to_run, of_step
from ladder.trial.count_modules import Row, add_adapters, add_asked_adapters, compacted, name_what_they_read, rows_of
from ladder.trial.count_structure import (
    ACTIVE_EXPERTS,
    blocks_of,
    cut_to_kinds,
    kinds_of,
    number_in,
    positions_of,
    share_letters,
    shares_of,
    stacks_of,
    text_modules,
)
from ladder.trial.model_class import auto_class, model_config, tasks_of
from ladder.trial.techniques import RankTechnique, UnknownKernelError
from ladder.units import GIB
from ladder.workload.workload import Task

_ADDRESSES = 64 * GIB
"""Chosen: several times what importing torch maps. Some models compute a table on the host while they are built, which
a nonsensical configuration makes huge."""
_SECONDS = 30.0
"""To run the code of a model without values. Chosen: most take less than 2 s, one with 128 layers of experts 9."""
_GATES = {"gate_proj", "gate_up_proj", "w3", "wi_1"}
"""What models call the matrix that makes a feed-forward net a gated one."""
_HEADS = ("num_attention_heads", "num_heads")
_LONGEST_TRIED = 65_536
"""Tokens. Chosen: tables of more positions are not computed, and a mask for more has too many values to be numbered."""
_BY_LENGTH = ("kept_by_length", "moved_by_length", "flops_32_by_length")
_STATES = ("state_size", "mamba_d_state", "ssm_state_size", "d_state", "lru_width", "linear_num_value_heads")
"""What models call the size of a state that goes from token to token."""
_INTERMEDIATE = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "decoder_ffn_dim")


def counted(
    raw: dict[str, Any],
    task: Task | None,
    replacing: Mapping[str, str] = MappingProxyType({}),
    lora: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What this program writes for the configuration `raw`. Raises what transformers raises."""
    if raw["model_type"] not in CONFIG_MAPPING:
        return {"unknown": _written_alike(raw["model_type"])}
    config = model_config(raw)
    tasks = tasks_of(config)
    if not tasks or (task is not None and task not in tasks):
        return {"tasks": tasks}

    def build(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config, task or tasks[0]).from_config(config)
        return model.to("meta", dtype)

    model = build()
    shares = shares_of(model, config)
    sizes = _sizes(model, config, shares)
    reply: dict[str, Any] = {"tasks": tasks, "sizes": sizes}
    rows = rows_of(model, {name for name, _ in text_modules(model)}, blocks_of(model), shares)
    try:
        with at_most(_SECONDS):
            _count_blocks(build, sizes, rows, config, replacing)
    except (Exception, TooLong) as error:  # whatever its code raises
        reply["uncounted"] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # peft may refuse a model, and trials say so where adapters are asked for
        add_adapters(rows, model)
    if lora is not None:
        try:
            add_asked_adapters(rows, build(), lora)
        except Exception as error:  # whatever peft says of names and values
            reply["refused"] = f"{type(error).__name__}: {error}"
    sizes["rows"] = compacted(rows)
    return reply


def _count_blocks(
    build: Callable[..., PreTrainedModel],
    sizes: dict[str, Any],
    rows: list[Row],
    config: Any,
    replacing: Mapping[str, str],
) -> None:
    """Add to `sizes` what blocks do, and to `rows` what they read.

    Blocks that are alike are run once, as each takes a tenth of a second; all of them where the model's code needs all.
    """
    kinds = kinds_of(stacks_of(build()), config.get_text_config())

    def cut(dtype: torch.dtype = torch.bfloat16) -> Ran:
        model = build(dtype)
        return Ran(model, cut_to_kinds(stacks_of(model), kinds))

    def whole(dtype: torch.dtype = torch.bfloat16) -> Ran:
        return Ran.whole(build(dtype))

    ran = cut
    try:
        found, length = _of_blocks(ran, sizes, rows)
    except Exception:
        ran = whole
        found, length = _of_blocks(ran, sizes, rows)
    sizes |= found
    share_letters(rows, kinds)
    sizes["blocks_with"] = {}
    for name, module in replacing.items():  # after all else, as they change transformers' own modules
        if block := _with_technique(importlib.import_module(module).TECHNIQUE, ran, sizes, length):
            sizes["blocks_with"][name] = block


class Ran(NamedTuple):
    """A model, and its blocks that are run."""

    model: PreTrainedModel
    blocks: Blocks

    @classmethod
    def whole(cls, model: PreTrainedModel) -> Ran:
        """`model` with all its blocks."""
        return cls(model, dict.fromkeys(blocks_of(model), 1))


def _of_blocks(build: Callable[..., Ran], sizes: Mapping[str, Any], rows: list[Row]) -> tuple[dict[str, Any], int]:
    """What blocks do, as fields of ModelShape, and the tokens that were run. What they read is added to `rows`."""
    depth, positions, made_for = (sizes[name] for name in ("num_layers", "max_positions", "made_for"))
    ran, has_state = build(), sizes["is_recurrent"]
    length = length_to_run(*ran, positions or made_for, has_state=has_state)
    plain = counted_blocks(*ran, depth, length, has_state=has_state)
    name_what_they_read(rows, ran.model, plain.inputs)
    if _breaks_beyond(ran, made_for):
        positions, made_for = made_for, None
    found: dict[str, Any] = {"has_wide_loss": plain.has_wide_loss, "max_positions": positions, "made_for": made_for}
    grows = _grows(plain.of_a_layer)
    wide = kept_in_32_bits(*build(torch.float32), depth, length, by_length=grows, has_state=has_state)
    return found | {"block": plain.of_a_layer | wide}, length


def _with_technique(
    technique: RankTechnique, build: Callable[..., Ran], sizes: Mapping[str, Any], length: int
) -> dict[str, float] | None:
    """What a block does with the kernels of `technique`, in `length` tokens; None if they do not know the model."""
    ran, in_32_bits = build(), build(torch.float32)
    if not (technique.stand_in(ran.model) and technique.stand_in(in_32_bits.model)):
        return None
    own: dict[str, float] = sizes["block"]
    depth, options = sizes["num_layers"], {"by_length": _grows(own), "has_state": sizes["is_recurrent"]}
    try:
        block = counted_blocks(*ran, depth, length, **options).of_a_layer
        return block | kept_in_32_bits(*in_32_bits, depth, length, **options)
    except UnknownKernelError:  # its experts, for example: then it is taken to keep what the model itself does
        return own


def _grows(block: Mapping[str, float]) -> bool:
    """Whether something grows with the sequence: a mask does, at least where autocast makes one for each block."""
    return any(block[name] for name in (*_BY_LENGTH, "masked"))


def _breaks_beyond(ran: Ran, length: int | None) -> bool:
    """Whether the model's code fails with one token more than the `length` that it was made for."""
    if length is None or length > _LONGEST_TRIED:
        return False
    try:
        of_step(*ran, 1, length + 1, backward=False)
    except Exception:  # whatever its code raises
        return True
    return False


def _written_alike(model_type: str) -> list[str]:
    """The types that are written like this one but for capitals, spaces and dashes."""

    def plain(name: str) -> str:
        return re.sub(r"[-_\s]+", "", name).lower()

    return [name for name in CONFIG_MAPPING if plain(name) == plain(model_type)]


class TooLong(BaseException):
    """No code of a model catches it."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooLong in the body after it has computed for `seconds`; in the main thread alone."""

    def end(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _sizes(model: PreTrainedModel, config: Any, shares: Mapping[nn.Parameter, float]) -> dict[str, Any]:
    """The fields of ModelShape that follow from the model as it is built; `shares` as `shares_of` gives them."""
    text = config.get_text_config()
    blocks, parameters = blocks_of(model), list(model.parameters())
    depth = number_in(text, "num_hidden_layers", "num_layers") or len(blocks) or 1
    # ALBERT has a block for several layers, which a token goes through as often.
    times = depth // len(blocks) if blocks and depth % len(blocks) == 0 else 1
    shared = {p for block in blocks for p in block.parameters()} if times > 1 else set()
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    in_blocks = [sum(p.numel() for p in block.parameters() if p not in tables) for block in blocks]
    products = sum(round(each.numel() * share) * (times if each in shared else 1) for each, share in shares.items())
    head = model.get_output_embeddings()
    tied = head is not None and head.weight in tables
    least = min(shares.values(), default=1.0)
    active = number_in(text, *ACTIVE_EXPERTS) or 1
    return {
        **_dimensions(text, model),
        "experts_of_a_token": active if least < 1 else 1,
        "num_experts": round(active / least),
        "num_layers": times * len(blocks) or depth,
        "section": _section(config, text),
        "num_parameters": sum(p.numel() for p in parameters),
        "num_matmul_parameters": products + (head.weight.numel() if tied else 0),
        "num_block_parameters": max(in_blocks, default=sum(p.numel() for p in parameters) // depth),
        "largest_parameter": max(p.numel() for p in parameters),
        "is_encoder_decoder": bool(config.is_encoder_decoder),
        "tied": tied,
        "fails_with_fsdp2": _fails_with_fsdp2(model),
        "has_plain_attention": _has_plain_attention(text, model),
        "checkpoints": bool(model.supports_gradient_checkpointing),
        "is_recurrent": number_in(text, *_STATES) is not None or number_in(text, *_HEADS) is None,
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


def _has_plain_attention(text: Any, model: PreTrainedModel) -> bool:
    own = text.to_dict()  # a configuration may refuse to name what differs from layer to layer
    kinds = set(own.get("layer_types") or ())
    window = own.get("sliding_window") if own.get("use_sliding_window", True) else None
    takes_others = getattr(model, "_supports_attention_backend", False) and model._supports_sdpa
    return bool(takes_others and window is None and kinds <= {"full_attention"})


def _dimensions(text: Any, model: PreTrainedModel) -> dict[str, Any]:
    """The sizes that predictions need, under the names of ModelShape."""
    hidden = number_in(text, "hidden_size") or 0
    heads = number_in(text, *_HEADS) or 1
    intermediate = number_in(text, *_INTERMEDIATE) or (number_in(text, "expand") or 4) * hidden
    shapes = {tuple(parameter.shape[-2:]) for parameter in model.parameters()}
    named = {part for name, _ in model.named_parameters() for part in name.split(".")}
    double = {(2 * intermediate, hidden), (hidden, 2 * intermediate)}
    most, made_for = positions_of(text, model)
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "num_kv_heads": number_in(text, "num_key_value_heads") or heads,
        "head_dim": number_in(text, "head_dim", "d_kv") or max(1, hidden // heads),
        "vocab_size": number_in(text, "vocab_size") or 0,
        "max_positions": most,
        "made_for": made_for,
        "gated_mlp": bool(named & _GATES) or bool(shapes & double),
    }


def _section(config: Any, text: Any) -> str:
    """The key of `config` under which the language model's sizes are; "" if they are at the top."""
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), "")


def main() -> int:
    """Count what stdin asks for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the controller handles Ctrl-C
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _ADDRESSES if hard == resource.RLIM_INFINITY else min(_ADDRESSES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    asked = json.load(sys.stdin)
    answers, sys.stdout = os.dup(1), sys.stderr  # transformers may print
    try:
        reply = counted(asked["config"], asked["task"], asked["replacing"], asked.get("lora"))
    except Exception as error:
        reply = {"failed": f"{type(error).__name__}: {error}"}
    os.write(answers, json.dumps(reply).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
