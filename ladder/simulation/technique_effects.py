"""What a technique changes in the physics of a simulated machine: one table, and the only place that knows their names.

The laws read the combined effects alone. An effect that nobody changes is neutral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ladder.candidates import ADAM_8BIT, BF16_STATES, SHARING, Engine

_LIGER = "liger"


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


NEUTRAL = Effects()

_TABLE: Mapping[str, Effects] = {
    # liger-kernel 0.8: RMSNorm saves its 16-bit input (2 of 6 bytes a value), SwiGLU recomputes the activated gate, the
    # loss is fused with the head. Counted in its Triton sources: a norm reads and writes 10 bytes a value instead of
    # 108, rotary positions 12 instead of 60, a gated net 16 instead of 33; 13 kernels run forward instead of 33.
    _LIGER: Effects(norm_keeps=1 / 3, keeps_gate=False, chunked_loss=True, traffic=0.25, kernels=0.45),
    # DeepSpeed's bf16_master_weights_and_grads with bf16_optimizer_states.
    BF16_STATES: Effects(master_bytes=2.0, moment_bytes=2.0, gradient_bytes=0.0),
    # bitsandbytes 0.50: a byte a value and an fp32 scale for each 256 of them; it looks each value up in a table.
    ADAM_8BIT: Effects(moment_bytes=1.0 + 4 / 256, update_passes=1.15),
    SHARING: Effects(shares_sequence=True),
}


def effects_of(engine: Engine) -> Effects:
    """The effects of all of an engine's techniques together."""
    combined = NEUTRAL
    for name in _techniques_of(engine):
        own = _TABLE.get(name, NEUTRAL)
        combined = replace(
            combined, **{key: value for key, value in vars(own).items() if value != getattr(NEUTRAL, key)}
        )
    return combined


def _techniques_of(engine: Engine) -> tuple[str, ...]:
    names = (_LIGER if engine.liger else "", SHARING if engine.ulysses else "", engine.numerics)
    return tuple(name for name in names if name)
