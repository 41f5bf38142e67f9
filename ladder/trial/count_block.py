"""What a model's blocks do in a training step: counted on tensors without memory, by running transformers' own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

_LONGEST = 2048
"""Tokens of the sequence, and half as many. Chosen: long enough for what depends on windows of attention; longer ones
cost no more, but many families cannot tell their positions apart."""
_POSITIONS = ("max_position_embeddings", "max_seq_len")
"""What configurations call the longest sequence."""
_PRODUCTS = ("mm", "attention", "linear", "conv")
"""Parts of the names of operations whose time follows from their arithmetic."""
_FREE = ("detach", "_unsafe_view", "empty", "lift_fresh")
"""Parts of the names of operations that start no kernel."""


def counted_block(model: PreTrainedModel, blocks: Sequence[nn.Module], layers: int) -> dict[str, float]:
    """The fields of `CountedBlock`: what `blocks`, which are those of `model`, do in each of so many layers.

    `model` has weights of 16 bits on the meta device. Raises what its code raises without values to read.
    """
    text = model.config.get_text_config()
    told = (getattr(text, name, None) for name in _POSITIONS)
    length = min((each for each in told if isinstance(each, int) and each > 1), default=_LONGEST)
    length = min(length, _LONGEST)
    model.train()
    longer, shorter = _of_a_token(model, blocks, length), _of_a_token(model, blocks, length // 2)
    by_length = [(a - b) / (length - length // 2) for a, b in zip(longer[:2], shorter[:2], strict=True)]
    kept, moved = (value - more * length for value, more in zip(longer[:2], by_length, strict=True))
    of_all = {"kept": kept, "kept_by_length": by_length[0], "moved": moved, "moved_by_length": by_length[1]}
    of_all |= {"kernels": longer[2], "tensors": sum(1 for block in blocks for _ in block.parameters())}
    return {name: value / layers for name, value in of_all.items()}


def _of_a_token(model: PreTrainedModel, blocks: Sequence[nn.Module], length: int) -> tuple[float, float, float]:
    """Bytes kept and moved per token of a further sequence, and kernels, of all blocks."""
    two, one = _step(model, blocks, 2, length), _step(model, blocks, 1, length)
    return (two[0] - one[0]) / length, (two[1] - one[1]) / length, two[2]


def _step(model: PreTrainedModel, blocks: Sequence[nn.Module], sequences: int, length: int) -> tuple[int, int, int]:
    """Bytes kept and moved, and kernels, of all blocks, forward and backward."""
    own = {_storage(each) for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}
    kernels = _Kernels()

    def keep(tensor: Tensor) -> Tensor:
        if kernels.inside and (storage := _storage(tensor)) not in own:
            kept.setdefault(storage, tensor)  # held, so that no other tensor gets its place
        return tensor

    handles = [handle for block in blocks for handle in _watch(block, kernels)]
    tokens = torch.zeros((sequences, length), dtype=torch.long, device="meta")
    try:
        with (
            torch.device("meta"),
            _AsOnGpus(),
            kernels,
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            model(input_ids=tokens, labels=tokens).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return sum(each.untyped_storage().nbytes() for each in kept.values()), kernels.moved, kernels.number


def _watch(block: nn.Module, kernels: _Kernels) -> list[Any]:
    """Tell `kernels` when `block` begins and ends, forward and backward."""

    def entered(inside: bool) -> Callable[..., None]:
        return lambda *_: setattr(kernels, "inside", inside)

    return [
        block.register_forward_pre_hook(entered(True)),
        block.register_forward_hook(entered(False)),
        block.register_full_backward_pre_hook(entered(True)),
        block.register_full_backward_hook(entered(False)),
    ]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Kernels(TorchDispatchMode):
    """Counts the kernels that run in blocks, and the bytes that those read and write that are no products."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.number = 0
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_local_scalar_dense" and args[0].dtype == torch.bool:
            return True  # masks are asked whether nothing is masked
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if self.inside and made and not func.is_view and not any(part in name for part in _FREE):
            self.number += 1
            if not any(part in name for part in _PRODUCTS):
                read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
                self.moved += sum(each.numel() * each.element_size() for each in (*read, *made))
        return result


class _AsOnGpus(TorchFunctionMode):
    """Attention and dropout as one kernel each, which they are on a GPU; on the meta device they are written out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = given.get("attn_mask", args[3] if len(args) > 3 else None)
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
