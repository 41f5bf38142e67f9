"""How fast this rank's device, its links, its host and its optimizer are, without a model. Seconds, not minutes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

_PRODUCTS = {
    "cuda": ((2048, 2048, 2048), (4096, 2048, 8192), (4096, 4096, 4096), (8192, 4096, 11008)),
    "cpu": ((256, 512, 512), (512, 1024, 1024)),
}
"""Rows, inner and columns. Chosen: from the blocks of 1-billion-parameter models to those of 7 billion; on a CPU, of
models that are trained there."""
_COPIED = {"cuda": 1 << 28, "cpu": 1 << 25}
"""Bytes of a copy. Chosen: many times what caches hold, and a small part of the device."""
_SIZES = {"cuda": (1 << 20, 1 << 24, 1 << 28), "cpu": (1 << 16, 1 << 20, 1 << 23)}
"""Bytes of a collective. Chosen: a small tensor, a layer, and several of ZeRO's buckets."""
_SECONDS = 0.15
"""Of one figure, after a first untimed repetition. Chosen: some thirty figures in less than ten seconds."""
_MOST_REPEATS = 50
"""Chosen: a median of more is no surer."""
_BLOCK_WIDTH = 64
"""Of a block that is launched. Chosen: its kernels take no time, so only launching them is seen."""
_OPTIMIZER_ELEMENTS = 8 << 20
"""Parameters of CPU Adam. Chosen: 128 MiB of states, more than the caches of the host hold."""

Point = dict[str, Any]


def device_rates(device: str) -> Iterator[tuple[str, list[Point]]]:
    """Name and points of each rate of one rank alone; all ranks measure at the same time, as they train."""
    yield "products", [_product(device, *shape) for shape in _PRODUCTS[device]]
    yield "copies", [_copy(device)]
    yield "launches", [_launches(device)]
    if device == "cuda":
        yield "pinned", [_pinned(up=True, down=False), _pinned(up=False, down=True), _pinned(up=True, down=True)]


def link_rates(device: str, group: dist.ProcessGroup | None = None) -> Iterator[tuple[str, list[Point]]]:
    """Of each collective that ZeRO uses, at several sizes, among the ranks of `group` (None: all)."""
    for name, collective in _collectives(group).items():
        points = []
        for size in _SIZES[device]:
            try:
                points.append(_collective(device, collective, size, group))
            except RuntimeError as error:
                if "support" not in str(error).lower():  # gloo of older versions has no reduce-scatter
                    raise
        if points:
            yield name, points


def optimizer_rate() -> Point:
    """CPU Adam of DeepSpeed, which must be built and loaded."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = torch.nn.Parameter(torch.randn(_OPTIMIZER_ELEMENTS))
    weights.grad = torch.randn(_OPTIMIZER_ELEMENTS)
    optimizer = DeepSpeedCPUAdam([weights], adamw_mode=True)
    seconds = _seconds("cpu", optimizer.step)
    return {"parameters": _OPTIMIZER_ELEMENTS, "seconds": seconds, "per_second": _OPTIMIZER_ELEMENTS / seconds}


def _product(device: str, rows: int, inner: int, columns: int) -> Point:
    """Operations per second in 16 bits. Random, because a GPU that multiplies ones keeps a higher clock."""
    dtype = torch.bfloat16 if device == "cpu" or torch.cuda.is_bf16_supported(False) else torch.float16
    one, other = (torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, inner), (inner, columns)))
    seconds = _seconds(device, lambda: torch.mm(one, other))
    operations = 2.0 * rows * inner * columns
    return {"shape": [rows, inner, columns], "operations": operations, "seconds": seconds}


def _copy(device: str) -> Point:
    source = torch.ones(_COPIED[device] // 4, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(device, lambda: target.copy_(source))
    return {"bytes": 2 * _COPIED[device], "seconds": seconds}  # read and written


def _launches(device: str) -> Point:
    """Seconds of the host for forward and backward of a block whose kernels have nothing to do."""
    width = _BLOCK_WIDTH
    shapes = {"q": width, "k": width, "v": width, "o": width, "gate": 2 * width, "up": 2 * width, "down": width}
    weights = {
        name: torch.randn(outputs, 2 * width if name == "down" else width, device=device, requires_grad=True)
        for name, outputs in shapes.items()
    }
    norms = [torch.ones(width, device=device, requires_grad=True) for _ in range(2)]
    hidden = torch.randn(1, 8, width, device=device, requires_grad=True)

    def step() -> None:
        _block(hidden, weights, norms).sum().backward()

    return {"seconds": _seconds(device, step)}


def _block(hidden: torch.Tensor, weights: dict[str, torch.Tensor], norms: list[torch.Tensor]) -> torch.Tensor:
    """A block as transformers writes Llama's, in single kernels."""
    normed = _norm(hidden, norms[0])
    query, key, value = (functional.linear(normed, weights[name]).view(1, 8, 4, -1).transpose(1, 2) for name in "qkv")
    seen = functional.scaled_dot_product_attention(_turned(query), _turned(key), value, is_causal=True)
    seen = seen.transpose(1, 2).reshape(hidden.shape)
    hidden = hidden + functional.linear(seen, weights["o"])
    normed = _norm(hidden, norms[1])
    gated = functional.silu(functional.linear(normed, weights["gate"])) * functional.linear(normed, weights["up"])
    return hidden + functional.linear(gated, weights["down"])


def _turned(heads: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings, with made-up angles."""
    half = heads.shape[-1] // 2
    return torch.cat((-heads[..., half:], heads[..., :half]), -1) * 0.5 + heads * 0.5


def _norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    variance = hidden.float().pow(2).mean(-1, keepdim=True)
    return weight * (hidden.float() * torch.rsqrt(variance + 1e-6)).to(hidden.dtype)


def _pinned(*, up: bool, down: bool) -> Point:
    """Bytes per second each way between this GPU and pinned host memory."""
    elements = _COPIED["cuda"] // 4
    on_host = [torch.ones(elements, pin_memory=True) for _ in range(2)]
    on_gpu = [torch.ones(elements, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def step() -> None:
        if up:
            with torch.cuda.stream(streams[0]):
                on_gpu[0].copy_(on_host[0], non_blocking=True)
        if down:
            with torch.cuda.stream(streams[1]):
                on_host[1].copy_(on_gpu[1], non_blocking=True)

    way = "both" if up and down else "up" if up else "down"
    return {"way": way, "bytes": _COPIED["cuda"], "seconds": _seconds("cuda", step)}


def _collectives(group: dist.ProcessGroup | None) -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    return {
        "all_reduce": lambda whole, part: dist.all_reduce(whole, group=group),
        "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole, group=group),
    }


def _collective(
    device: str, run: Callable[[torch.Tensor, torch.Tensor], Any], size: int, group: dist.ProcessGroup | None
) -> Point:
    ranks = dist.get_world_size(group)
    part = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    dist.barrier(group)
    # All ranks must repeat it as often, so the first one says how often.
    repeats = torch.tensor([_repeats(_once(device, lambda: run(whole, part)))], device=device)
    dist.broadcast(repeats, group=group, group_src=0)
    seconds = [_once(device, lambda: run(whole, part)) for _ in range(int(repeats))]
    return {"bytes": whole.numel() * 4, "seconds": statistics.median(seconds)}


def _seconds(device: str, run: Callable[[], Any]) -> float:
    """The median of several repetitions after one untimed; libraries choose their kernels in the first."""
    _once(device, run)
    repeats = _repeats(_once(device, run))
    return statistics.median(_once(device, run) for _ in range(repeats))


def _repeats(seconds: float) -> int:
    return min(_MOST_REPEATS, max(3, math.ceil(_SECONDS / max(seconds, 1e-6))))


def _once(device: str, run: Callable[[], Any]) -> float:
    _wait(device)
    began = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
