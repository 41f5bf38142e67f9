"""What a technique changes in the memory of a step, and in its time on a simulated machine."""

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
    traffic: float = 1.0
    """Bytes that element-wise kernels read and write, relative to plain transformers."""
    kernels: float = 1.0
    """What launching a layer's kernels takes the host, relative to plain transformers."""
    master_bytes: float = 4.0
    """Bytes of a parameter's master weight."""
    moment_bytes: float = 4.0
    """Bytes of each of Adam's two moments of a parameter."""
    gradient_bytes: float = 4.0
    """Bytes of the optimizer's copy of a gradient; 0 if it uses the 16-bit gradient."""
    update_passes: float = 1.0
    """Memory traffic of the optimizer, relative to reading and writing each of its values once."""
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
