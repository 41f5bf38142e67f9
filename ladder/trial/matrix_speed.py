"""How fast this rank's device computes the model's matrix products alone: the physical limit of its training."""

from __future__ import annotations

import torch

from ladder.events.protocol import ProductSpec, TrialSpec
from ladder.events.step_policy import CandidateSpec
from ladder.trial.model import DTYPES
from ladder.trial.reporter import now

_MOST_TOKENS = 8192
"""Of a product. Chosen: with more, the rate of large GPUs no longer rises, and the buffers stay below 1 GiB."""
_OPERATIONS = {"cuda": 4e12, "cpu": 2e9}
"""Of all repetitions of a product. Chosen: some 10 ms on a GPU of 400 TFLOP/s, and 50 ms on a CPU core."""


def matrix_flops(spec: TrialSpec, candidate: CandidateSpec) -> float | None:
    """Operations per second in the products of the model's matrices, each with its share of the work.

    A product is timed as training has it: for outputs, for gradients of inputs, and for those of weights. None if the
    device has no memory left for them.
    """
    try:
        if spec.device == "cuda":
            torch.cuda.empty_cache()
        tokens = min(candidate.micro_batch * spec.seq_len, _MOST_TOKENS)
        seconds = [_seconds_per_operation(spec, product, tokens) for product in spec.products]
    except torch.OutOfMemoryError:
        return None
    work = [product.count * product.tokens * product.inputs * product.outputs for product in spec.products]
    return sum(work) / sum(each * one for each, one in zip(work, seconds, strict=True))


def _seconds_per_operation(spec: TrialSpec, product: ProductSpec, tokens: int) -> float:
    size = product.inputs * product.outputs
    rows = max(1, min(round(tokens * product.tokens), round(_OPERATIONS[spec.device] / 6 / size)))
    shapes = ((rows, product.inputs), (product.inputs, product.outputs), (rows, product.outputs))
    # Random, because a GPU that multiplies ones draws less power and keeps a higher clock.
    inputs, weights, gradients = (torch.randn(shape, dtype=DTYPES[spec.dtype], device=spec.device) for shape in shapes)
    repetitions = max(1, round(_OPERATIONS[spec.device] / (6 * rows * size)))
    seconds = []
    for repeated in (1, repetitions):  # libraries choose their kernels in the first call
        began = _now(spec.device)
        for _ in range(repeated):
            torch.mm(inputs, weights)
            torch.mm(gradients, weights.t())
            torch.mm(inputs.t(), gradients)
        seconds.append((_now(spec.device) - began) / repeated)
    return seconds[-1] / (6 * rows * size)


def _now(device: str) -> float:
    """The time once all kernels have ended."""
    if device == "cuda":
        torch.cuda.synchronize()
    return now()
