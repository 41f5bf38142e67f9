"""What a model's blocks do in a training step: counted on tensors without memory, by running transformers' own code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
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
    biased: float
    """Scores of attention with a bias that is trained."""
    from_python: int = 0
    """Kernels that Python starts one by one, as Triton's."""


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


def counted_blocks(
    model: PreTrainedModel, blocks: Blocks, layers: int, positions: int | None, *, by_length: bool = True
) -> CountedBlocks:
    """What `blocks`, which are those of `model`, do in each of so many layers.

    `model` tells so many `positions` apart, or any number. It has weights of 16 bits on the meta device, which are
    frozen afterwards. Without `by_length`, nothing grows with the sequence. Raises what its code raises without values
    to read, and ValueError for a result that cannot be true.
    """
    length = min(positions or _LONGEST, _LONGEST)
    model.train()
    losses: set[torch.dtype] = set()
    longer = _of_a_sequence(model, blocks, length, losses=losses)
    shorter = _of_a_sequence(model, blocks, length // 2) if by_length else _half(longer)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    inputs: Inputs = {}
    frozen = _of_a_sequence(model, blocks, length, backward=False, inputs=inputs)
    kept, kept_more = _line(longer.kept, shorter.kept, length)
    moved, moved_more = _line(longer.moved, shorter.moved, length)
    if min(kept, moved) <= 0:
        raise ValueError(f"{kept:.0f} bytes kept and {moved:.0f} moved for a token")
    of_all = {"kept": kept, "kept_by_length": kept_more, "moved": moved, "moved_by_length": moved_more}
    flops, flops_more = _line(longer.flops_32, shorter.flops_32, length)
    of_all |= {"flops_32": flops, "flops_32_by_length": flops_more, "masked": longer.masked / length}
    of_all["biased_by_length"] = longer.biased / length**2
    of_all |= {"kept_for_weights": (longer.kept - frozen.kept) / length, "kernels": longer.kernels}
    of_all |= {
        "from_python": longer.from_python,
        "tensors": sum(times for block, times in blocks.items() for _ in block.parameters()),
    }
    return CountedBlocks({name: value / layers for name, value in of_all.items()}, inputs, torch.float32 in losses)


def kept_under_autocast(
    model: PreTrainedModel, blocks: Blocks, layers: int, positions: int | None, *, by_length: bool
) -> dict[str, float]:
    """Bytes that a layer of `model`, with weights of 32 bits on the meta device, keeps of a token under autocast.

    As fields of `CountedBlock`: those of any sequence, and those more for each token of its sequence.
    """
    length = min(positions or _LONGEST, _LONGEST)
    model.train()
    options = {"backward": False, "autocast": True}
    longer = _of_a_sequence(model, blocks, length, **options)
    shorter = _of_a_sequence(model, blocks, length // 2, **options) if by_length else _half(longer)
    fixed, more = _line(longer.kept, shorter.kept, length)
    return {"kept_wide": fixed / layers, "kept_wide_by_length": more / layers}


def _half(step: Step) -> Step:
    """What half a sequence adds if nothing of it grows with its length."""
    halves = {name: getattr(step, name) / 2 for name in ("kept", "moved", "flops_32", "masked", "biased")}
    return step._replace(**halves)


def _line(of_longer: float, of_shorter: float, length: int) -> tuple[float, float]:
    """What a token with no sequence around it has, and what it has more for each token of its sequence."""
    more = (of_longer / length - of_shorter / (length // 2)) / (length - length // 2)
    fixed, more = round(of_longer / length - more * length, 6), round(more, 6)
    if min(fixed, more) < 0:
        raise ValueError(f"{fixed:.0f} a token and {more:.1f} more for each of its sequence")
    return fixed, more


def _of_a_sequence(model: PreTrainedModel, blocks: Blocks, length: int, **options: Any) -> Step:
    """What a further sequence of a micro-batch adds, so without what all share; but all kernels."""
    two, one = (of_step(model, blocks, number, length, **options) for number in (2, 1))
    more = {name: getattr(two, name) - getattr(one, name) for name in ("kept", "moved", "flops_32", "masked", "biased")}
    return Step(**more, kernels=two.kernels, from_python=two.from_python)


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
) -> Step:
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
        as_on_gpus, casts = _AsOnGpus(kernels, losses), _Autocast() if autocast else nullcontext()
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
        inputs |= {each: (_storage(tensor), _storage(tensor) in kept.tensors) for each, tensor in read.items()}
    held = sum(each.untyped_storage().nbytes() * times for each, times in kept.tensors.values())
    amounts = kernels.moved, kernels.number, kernels.flops_32, kernels.masked, kernels.biased, kernels.from_python
    return Step(held, *amounts)


class _Kept:
    """What blocks keep for backward, but for weights and buffers: a hook of autograd's."""

    def __init__(self, kernels: Kernels, model: nn.Module) -> None:
        self._kernels = kernels
        self._weights = {_storage(each) for each in (*model.parameters(), *model.buffers())}
        self.tensors: dict[int, tuple[Tensor, int]] = {}
        """By storage: a tensor, and how many blocks of the model keep one like it."""

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._kernels.times and (storage := _storage(tensor)) not in self._weights:
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


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Kernels(TorchDispatchMode):
    """Counts the kernels that run in blocks, what they read and write, and which products are slow ones."""

    counting: Kernels
    """The newest, for kernels that stand for others (`count_liger`)."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.times = False, 0
        """Whether a block runs, and for how many of the model it stands."""
        self.made_outside: set[int] = set()
        """Storages that no block made."""
        self.number = self.from_python = 0
        self.moved = self.flops_32 = self.masked = self.biased = 0
        Kernels.counting = self
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
        if not func.is_view:
            change = self.made_outside.difference_update if self.inside else self.made_outside.update
            change(map(_storage, made))
        if self.times and made and not func.is_view and not any(part in name for part in _FREE):
            self.number += self.times
            read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            moved = self.times * sum(each.numel() * each.element_size() for each in (*read, *made))
            if not any(part in name for part in _PRODUCTS):
                self.moved += moved
            elif (flops_of := flop_registry.get(func._overloadpacket)) is not None:
                flops = self.times * flops_of(*args, **(kwargs or {}), out_val=result)
                if read[0].dtype == torch.float32:
                    self.flops_32 += flops
                elif _BATCHED in name and flops < _ENOUGH * moved:
                    self.moved += moved
        return result

    def started_from_python(self, tensors: Sequence[Any]) -> None:
        """Count one kernel that reads and writes these."""
        self.number, self.from_python = self.number + self.times, self.from_python + self.times
        moved = sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))
        self.moved += self.times * moved


class _AsOnGpus(TorchFunctionMode):
    """Attention and dropout keep and move what their kernels on a GPU do; the meta device would write them out."""

    def __init__(self, kernels: Kernels, losses: set[torch.dtype] | None) -> None:
        super().__init__()
        self._kernels, self._losses = kernels, losses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            mask = given.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is not None:
                self._kernels.masked += args[0].numel() * self._kernels.times
                scores = args[0].shape[:3].numel() * args[1].shape[2]
                self._kernels.biased += scores * self._kernels.times * mask.requires_grad
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.empty_like(mask, dtype=args[0].dtype)
            return _Attention.apply(*args[:3], mask)
        if func is functional.dropout and _drops(*args, **given):
            return _Dropout.apply(args[0])
        if func is functional.cross_entropy and self._losses is not None:
            self._losses.add(args[0].dtype)
        return func(*args, **given)


class _Autocast(TorchFunctionMode):
    """What autocast does on a GPU to the operations that models use; the meta device has none.

    The lists are torch's: https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior
    """

    _NARROW = (
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum"),
        *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention", "_grouped_mm", "grouped_mm"),
    )
    _WIDE = (
        *("exp", "log", "log1p", "pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "softmax", "log_softmax"),
        *("softplus", "layer_norm", "group_norm", "norm", "sum", "prod", "cumsum", "cross_entropy", "nll_loss"),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if name in self._NARROW:
            args, given = tree_map(_narrow, (args, given))
        elif name in self._WIDE and not given.get("dtype"):
            args, given = tree_map(_wide, (args, given))
        return func(*args, **given)


def _narrow(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _wide(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


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
