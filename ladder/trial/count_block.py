"""What a model's blocks do in a training step: counted on tensors without memory, by running transformers' own code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

_LONGEST = 2048
"""Tokens of the longer of two sequences; the other has half. Chosen: longer than most windows of attention."""
_PRODUCTS, _BATCHED = ("mm", "conv"), "bmm"
"""Parts of the names of operations whose time follows from their arithmetic, and of those with a product for each head,
which may have too little of it."""
_ENOUGH = 150.0
"""Operations for each byte that a batched product has to have for that. Derived: data sheets of A100 (156), H200 (206)
and H100 (295)."""
_FREE = ("detach", "_unsafe_view", "empty", "lift_fresh")
"""Parts of the names of operations that start no kernel."""
_ANSWERS = {
    **dict.fromkeys(("aten::all", "aten::_is_all_true", "aten::eq.Scalar"), True),
    **dict.fromkeys(("aten::any", "aten::lt.Scalar"), False),
}
"""What is answered where code asks for a value, by the operation that makes it: nothing is masked, no token pads, and
no random number is so small that a layer is left out."""


class Step(NamedTuple):
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


def counted_block(
    model: PreTrainedModel, blocks: Sequence[nn.Module], layers: int, positions: int | None
) -> dict[str, float]:
    """The fields of `CountedBlock`: what `blocks`, which are those of `model`, do in each of so many layers.

    `model` tells so many `positions` apart, or any number. It has weights of 16 bits on the meta device, which are
    frozen afterwards. Raises what its code raises without values to read, and ValueError for a result that cannot be
    true.
    """
    length = min(positions or _LONGEST, _LONGEST)
    model.train()
    longer, shorter = _of_a_sequence(model, blocks, length), _of_a_sequence(model, blocks, length // 2)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    frozen = _of_a_sequence(model, blocks, length, backward=False)
    kept, kept_more = _line(longer.kept, shorter.kept, length)
    moved, moved_more = _line(longer.moved, shorter.moved, length)
    if min(kept, moved) <= 0:
        raise ValueError(f"{kept:.0f} bytes kept and {moved:.0f} moved for a token")
    of_all = {"kept": kept, "kept_by_length": kept_more, "moved": moved, "moved_by_length": moved_more}
    flops, flops_more = _line(longer.flops_32, shorter.flops_32, length)
    of_all |= {"flops_32": flops, "flops_32_by_length": flops_more, "masked": longer.masked / length}
    of_all |= {"kept_for_weights": (longer.kept - frozen.kept) / length, "kernels": longer.kernels}
    of_all |= {"tensors": sum(1 for block in blocks for _ in block.parameters())}
    return {name: value / layers for name, value in of_all.items()}


def _line(of_longer: float, of_shorter: float, length: int) -> tuple[float, float]:
    """What a token with no sequence around it has, and what it has more for each token of its sequence."""
    more = (of_longer / length - of_shorter / (length // 2)) / (length - length // 2)
    fixed, more = round(of_longer / length - more * length, 6), round(more, 6)
    if min(fixed, more) < 0:
        raise ValueError(f"{fixed:.0f} a token and {more:.1f} more for each of its sequence")
    return fixed, more


def _of_a_sequence(model: PreTrainedModel, blocks: Sequence[nn.Module], length: int, *, backward: bool = True) -> Step:
    """What a further sequence of a micro-batch adds, so without what all share; but all kernels."""
    two, one = (of_step(model, blocks, number, length, backward=backward) for number in (2, 1))
    more = {name: getattr(two, name) - getattr(one, name) for name in ("kept", "moved", "flops_32", "masked")}
    return Step(**more, kernels=two.kernels)


def of_step(
    model: PreTrainedModel, blocks: Sequence[nn.Module], sequences: int, length: int, *, backward: bool
) -> Step:
    """What all `blocks` of `model`, which is on the meta device, do in a step with so many sequences."""
    weights = {_storage(each) for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}
    kernels, ran = _Kernels(), set[nn.Module]()

    def keep(tensor: Tensor) -> Tensor:
        if kernels.inside and (storage := _storage(tensor)) not in weights:
            kept.setdefault(storage, tensor)  # held, so that no other tensor gets its place
        return tensor

    handles = [handle for block in blocks for handle in _watch(block, kernels, ran)]
    tokens = torch.zeros((sequences, length), dtype=torch.long, device="meta")
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with warnings.catch_warnings(), torch.device("meta"), _AsOnGpus(kernels), kernels, hooks:
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
    held = sum(each.untyped_storage().nbytes() for each in kept.values())
    return Step(held, kernels.moved, kernels.number, kernels.flops_32, kernels.masked)


def _watch(block: nn.Module, kernels: _Kernels, ran: set[nn.Module]) -> list[Any]:
    """Tell `kernels` when `block` begins and ends, forward and backward, and `ran` that it did."""

    def entered(inside: bool) -> Callable[..., None]:
        return lambda *_: setattr(kernels, "inside", inside)

    return [
        block.register_forward_pre_hook(entered(True)),
        block.register_forward_hook(lambda *_: ran.add(block)),
        block.register_forward_hook(entered(False)),
        block.register_full_backward_pre_hook(entered(True)),
        block.register_full_backward_hook(entered(False)),
    ]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Kernels(TorchDispatchMode):
    """Counts the kernels that run in blocks, what they read and write, and which products are slow ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.number = 0
        self.moved = self.flops_32 = self.masked = 0
        self._asked: dict[int, str] = {}
        """By storage of a single boolean: the operation that made it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_local_scalar_dense" and args[0].dtype == torch.bool:
            return _ANSWERS[self._asked[_storage(args[0])]]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.bool and result.numel() == 1:
            self._asked[_storage(result)] = name
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if self.inside and made and not func.is_view and not any(part in name for part in _FREE):
            self.number += 1
            read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            moved = sum(each.numel() * each.element_size() for each in (*read, *made))
            if not any(part in name for part in _PRODUCTS):
                self.moved += moved
            elif (flops_of := flop_registry.get(func._overloadpacket)) is not None:
                flops = flops_of(*args, **(kwargs or {}), out_val=result)
                if read[0].dtype == torch.float32:
                    self.flops_32 += flops
                elif _BATCHED in name and flops < _ENOUGH * moved:
                    self.moved += moved
        return result


class _AsOnGpus(TorchFunctionMode):
    """Attention and dropout keep and move what their kernels on a GPU do; the meta device would write them out."""

    def __init__(self, kernels: _Kernels) -> None:
        super().__init__()
        self._kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = given.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is not None:
                self._kernels.masked += args[0].numel() * self._kernels.inside
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.empty_like(mask, dtype=args[0].dtype)
            return _Attention.apply(*args[:3], mask)
        if func is functional.dropout and _drops(*args, **given):
            return _Dropout.apply(args[0])
        return func(*args, **given)


def _drops(inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """The arguments are those of torch's dropout."""
    return training and p > 0


class _Attention(torch.autograd.Function):
    """What SDPA's kernels on GPUs keep: their inputs and output, and a number in 32 bits for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        same = query.shape[3] == value.shape[3]
        # Laid out as the queries are: where these were put together, what comes next has to copy it.
        result = torch.empty_like(query if same else query[..., :1].expand(*query.shape[:3], value.shape[3]))
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, mask, *_ = ctx.saved_tensors
        of_mask = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_mask


class _Dropout(torch.autograd.Function):
    """A kernel that keeps a mask of one byte a value."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        mask = torch.ones_like(inputs, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return inputs * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradients[0].mul(mask)
