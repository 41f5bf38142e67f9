"""What a technique changes in the physics of a simulated machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effects:
    """How a model's kernels, its loss and its optimizer differ from those of plain transformers and AdamW."""

    norm_keeps: float = 1.0
    """What an RMSNorm saves besides its output, of what the one in Python saves."""
    keeps_gate: bool = True
    """Whether a gated net saves the activated gate; if not, its backward works in place."""
    chunked_loss: bool = False
    """Whether the loss takes the logits in pieces, and makes their gradients at once."""
    traffic: float = 1.0
    """Bytes that element-wise kernels read and write."""
    kernels: float = 1.0
    """How many kernels are started for a layer."""
    master_bytes: float = 4.0
    """Of one parameter's master weight."""
    moment_bytes: float = 4.0
    """Of each of Adam's two moments."""
    gradient_bytes: float = 4.0
    """Of the copy of a gradient that the optimizer takes; 0 where it takes the 16-bit one."""
    update_passes: float = 1.0
    """Reading and writing in the optimizer, of what its widths ask for."""
    shares_sequence: bool = False
    """Whether all ranks work on one sequence, each on its part."""
