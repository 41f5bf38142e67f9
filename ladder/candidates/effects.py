"""What a technique changes in a step: in its memory, and in its time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effects:
    """How a model's kernels, its loss and its optimizer differ from those of plain transformers and AdamW."""

    norm_keeps: float = 1.0
    """Bytes that an RMSNorm saves besides its output, relative to transformers' Python implementation."""
    keeps_gate: bool = True
    """Whether a gated MLP saves the activated gate; if not, its backward works in place."""
    chunked_loss: bool = False
    """Whether the loss processes the logits in chunks and computes their gradients at once."""
    keeps_casts: bool = True
    """Whether autocast's copies of weights are kept for backward."""
    compute: float = 1.0
    """Seconds of matrix products, relative to the usual kernels."""
    moved_by_loss: float | None = None
    """Bytes that the loss reads and writes for each logit; None for as many as without the technique."""
    master_bytes: float = 4.0
    """Bytes of a parameter's master weight."""
    moment_bytes: float = 4.0
    """Bytes of each of Adam's two moments of a parameter."""
    gradient_bytes: float = 4.0
    """Bytes of the optimizer's copy of a gradient; 0 if it uses the 16-bit gradient."""
    tensor_step: float = 1.0
    """What an optimizer step takes the host for each parameter, relative to the stage's own."""
    copied_in_node: bool = False
    """Whether each node keeps a second copy of the weights, so that only what changed is gathered from other nodes."""
    divides_gradients: bool = False
    """Whether gradients are divided in every micro-step, in place of whole ones until the last."""
    divided_in_node: bool = False
    """Whether weights and states are divided within a node, and are the same on all nodes."""
    shares_sequence: bool = False
    """Whether all ranks work on one sequence, each on a part (sequence parallelism)."""
