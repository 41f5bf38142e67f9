"""What a model's blocks do in a training step: counted on tensors without memory, by running transformers' own code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ladder.trial.count_kernels import AsOnGpus, Autocast, Kernels, storage_of
from ladder.trial.count_modules import packs

_LONGEST = 2048
"""Tokens of the longer of two sequences; the other has half. Chosen: longer than most windows of attention."""
_FIRST_TRIED, _SETTLED = 32, 0.02
"""Tokens of the first sequence of a model with a state, and by which share its tokens may differ from those of one of
half its length. Chosen: chunks of the usual 64 to 256 tokens are then filled, and a state of its own is little."""


class CountedStep(NamedTuple):
    """What all blocks do in a step."""

    kept: float
    """Bytes kept for backward."""
    moved: float
    """Bytes that kernels read and write, but for products with enough arithmetic."""
    kernels: int
    flops_32: float
    """Operations of products in 32 bits."""
    masked: float
    """Values of queries in attention with a mask."""
    biased: float
    """Scores of attention with a bias that is trained."""
    dropped: float
    """Scores of attention some of which are dropped."""
    from_python: int = 0
    """Kernels that Python starts one by one, as Triton's."""


_AMOUNTS = ("kept", "moved", "flops_32", "masked", "biased", "dropped")
"""What grows with the sequences of a step."""
Blocks = Mapping[nn.Module, int]
"""The blocks of a model that are run, and for how many of the whole model's each stands; 0 for one beside them."""
Inputs = dict[nn.Module, tuple[int, bool]]
"""By linear layer: which tensor it reads, and whether that is kept even where all weights are frozen."""


class CountedBlocks(NamedTuple):
    """What the blocks of a model do."""

    of_a_layer: dict[str, float]
    """The fields of `CountedBlock`."""
    inputs: Inputs
    has_wide_loss: bool
    """The loss is computed in 32 bits."""


def length_to_run(model: PreTrainedModel, blocks: Blocks, positions: int | None, *, has_state: bool) -> int:
    """Tokens of the longer sequence that is run, of a model that tells so many `positions` apart, or any number.

    With a state, as few as tell what a further one keeps: some layers compute whole chunks, and others go from token to
    token in Python, so that many tokens take long.
    """
    longest = min(positions or _LONGEST, _LONGEST)
    if not has_state:
        return longest
    model.train()
    length, before = _FIRST_TRIED, 0.0
    while length < longest:
        kept = _of_a_sequence(model, blocks, length, backward=False).kept / length
        if abs(kept - before) <= _SETTLED * kept:
            return length
        length, before = 2 * length, kept
    return longest


def counted_blocks(
    model: PreTrainedModel, blocks: Blocks, layers: int, length: int, *, by_length: bool = True, has_state: bool = False
) -> CountedBlocks:
    """What `blocks`, which are those of `model`, do in each of so many layers, in sequences of up to `length` tokens.

    `model` has weights of 16 bits on the meta device, which are frozen afterwards. Without `by_length`, nothing grows
    with the sequence; if it `has_state`, what is kept does not. Raises what its code raises without values to read, and
    ValueError for a result that cannot be true.
    """
    model.train()
    losses: set[torch.dtype] = set()
    longer = _of_a_sequence(model, blocks, length, losses=losses)
    shorter = _of_a_sequence(model, blocks, length // 2) if by_length or has_state else _half(longer)
    if has_state:  # what a sequence has once, as its state, is little
        most = {name: min(getattr(shorter, name), getattr(longer, name) / 2) for name in ("moved", "flops_32")}
        shorter = shorter._replace(kept=longer.kept / 2, **most)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    inputs: Inputs = {}
    frozen = _of_a_sequence(model, blocks, length, backward=False, inputs=inputs)
    kept, kept_more = _line(longer.kept, shorter.kept, length)
    moved, moved_more = _line(longer.moved, shorter.moved, length)
    if min(kept, moved) <= 0:
        raise ValueError(f"{kept:.0f} bytes kept and {moved:.0f} moved for a token")
    of_all = {"kept": kept, "kept_by_length": kept_more, "moved": moved, "moved_by_length": moved_more}
    of_all["kernels"] = longer.kernels
    if has_state:
        kernels_more = (longer.kernels - shorter.kernels) / (length - length // 2)
        of_all |= {"kernels": longer.kernels - kernels_more * length, "kernels_by_length": kernels_more}
    flops, flops_more = _line(longer.flops_32, shorter.flops_32, length)
    of_all |= {"flops_32": flops, "flops_32_by_length": flops_more, "masked": longer.masked / length}
    of_all |= {"biased_by_length": longer.biased / length**2, "dropped_by_length": longer.dropped / length**2}
    of_all |= {
        "kept_for_weights": (longer.kept - frozen.kept) / length,
        "from_python": longer.from_python,
        "tensors": sum(times for block, times in blocks.items() for _ in block.parameters()),
    }
    return CountedBlocks({name: value / layers for name, value in of_all.items()}, inputs, torch.float32 in losses)


def kept_in_32_bits(
    model: PreTrainedModel, blocks: Blocks, layers: int, length: int, *, by_length: bool, has_state: bool
) -> dict[str, float]:
    """Bytes that a layer of `model`, with weights of 32 bits on the meta device, keeps of a token under autocast.

    As fields of `CountedBlock`: those of any sequence, and those more for each token of its sequence; and the same
    where all weights are frozen and its linear layers stand for packed ones. `model` is changed so. If it `has_state`,
    which has 32 bits in any case, those without autocast too, and none of them grow.
    """
    model.train()

    def kept(name: str) -> dict[str, float]:
        longer = _of_a_sequence(model, blocks, length, backward=False, autocast=True)
        grows = by_length and not has_state
        shorter = _of_a_sequence(model, blocks, length // 2, backward=False, autocast=True) if grows else _half(longer)
        fixed, more = _line(longer.kept, shorter.kept, length)
        return {name: fixed / layers, f"{name}_by_length": more / layers}

    trained: dict[str, float] = {}
    if has_state:
        trained["kept_in_32_bits"] = _of_a_sequence(model, blocks, length, backward=False).kept / length / layers
    trained |= kept("kept_wide")
    model.requires_grad_(False)
    model.enable_input_require_grads()
    for module in model.modules():
        if module is not model.get_output_embeddings() and packs(module):
            module.register_forward_hook(_in_the_type_of_its_input)
    return trained | kept("kept_beside_packed")


def _in_the_type_of_its_input(_: nn.Module, called_with: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """What a layer of bitsandbytes makes: it computes in 16 bits, and autocast does not know it."""
    return output.to(called_with[0].dtype)


def _half(step: CountedStep) -> CountedStep:
    """What half a sequence adds if nothing of it grows with its length."""
    halves = {name: getattr(step, name) / 2 for name in _AMOUNTS}
    return step._replace(**halves)


def _line(of_longer: float, of_shorter: float, length: int) -> tuple[float, float]:
    """What a token with no sequence around it has, and what it has more for each token of its sequence."""
    more = (of_longer / length - of_shorter / (length // 2)) / (length - length // 2)
    fixed, more = round(of_longer / length - more * length, 6), round(more, 6)
    if min(fixed, more) < 0:
        raise ValueError(f"{fixed:.0f} a token and {more:.1f} more for each of its sequence")
    return fixed, more


def _of_a_sequence(model: PreTrainedModel, blocks: Blocks, length: int, **options: Any) -> CountedStep:
    """What a further sequence of a micro-batch adds, so without what all share; but all kernels."""
    two, one = (of_step(model, blocks, number, length, **options) for number in (2, 1))
    more = {name: getattr(two, name) - getattr(one, name) for name in _AMOUNTS}
    return CountedStep(**more, kernels=two.kernels, from_python=two.from_python)


def of_step(
    model: PreTrainedModel,
    blocks: Blocks,
    sequences: int,
    length: int,
    *,
    backward: bool = True,
    inputs: Inputs | None = None,
    losses: set[torch.dtype] | None = None,
    autocast: bool = False,
) -> CountedStep:
    """What all `blocks` of `model`, which is on the meta device, do in a step with so many sequences.

    Into `inputs` goes what their layers read, and into `losses` the type of what a loss is computed of.
    """
    kernels, ran = Kernels(), set[nn.Module]()
    kept = _Kept(kernels, model)
    handles = [handle for block, times in blocks.items() for handle in _watch(block, times, kernels, ran)]
    read: dict[nn.Module, Tensor] = {}
    if inputs is not None:
        layers = [
            each for block, times in blocks.items() for each in block.modules() if times and hasattr(each, "weight")
        ]
        handles += [each.register_forward_pre_hook(_remember(read)) for each in layers]
    tokens = torch.zeros((sequences, length), dtype=torch.long, device="meta")
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor)
        as_on_gpus, casts = AsOnGpus(kernels, losses), Autocast() if autocast else nullcontext()
        with warnings.catch_warnings(), torch.device("meta"), as_on_gpus, casts, kernels, hooks:
            warnings.filterwarnings("error", message="Full backward hook")  # it would miss the block's backward
            loss = model(input_ids=tokens, labels=tokens).loss
            if backward:
                loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    if ran != set(blocks):
        raise ValueError(f"{len(ran)} of {len(blocks)} blocks ran")
    if inputs is not None:
        inputs |= {each: (storage_of(tensor), storage_of(tensor) in kept.tensors) for each, tensor in read.items()}
    held = sum(each.untyped_storage().nbytes() * times for each, times in kept.tensors.values())
    amounts = kernels.moved, kernels.number, kernels.flops_32, kernels.masked, kernels.biased, kernels.dropped
    return CountedStep(held, *amounts, kernels.from_python)


class _Kept:
    """What blocks keep for backward, but for weights and buffers: a hook of autograd's."""

    def __init__(self, kernels: Kernels, model: nn.Module) -> None:
        self._kernels = kernels
        self._weights = {storage_of(each) for each in (*model.parameters(), *model.buffers())}
        self.tensors: dict[int, tuple[Tensor, int]] = {}
        """By storage: a tensor, and how many blocks of the model keep one like it."""

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._kernels.times and (storage := storage_of(tensor)) not in self._weights:
            times = 1 if storage in self._kernels.made_outside else self._kernels.times  # as what masks all blocks
            self.tensors.setdefault(storage, (tensor, times))  # held, so that no other gets its place
        return tensor


def _remember(read: dict[nn.Module, Tensor]) -> Callable[..., None]:
    """A hook that keeps in `read` what a module is called with, so that no other tensor gets its place."""
    return lambda module, called_with: read.update({module: called_with[0]} if called_with else {})


def _watch(block: nn.Module, times: int, kernels: Kernels, ran: set[nn.Module]) -> list[Any]:
    """Tell `kernels` when `block` begins and ends, forward and backward, and `ran` that it did."""

    def entered(inside: bool) -> Callable[..., None]:
        return lambda *_: vars(kernels).update(inside=inside, times=times if inside else 0)

    return [
        block.register_forward_pre_hook(entered(True)),
        block.register_forward_hook(lambda *_: ran.add(block)),
        block.register_forward_hook(entered(False)),
        block.register_full_backward_pre_hook(entered(True)),
        block.register_full_backward_hook(entered(False)),
    ]
