"""One operation of a model, and the operations of a block.

An operation says what it saves for backward, and which gradients its backward creates and frees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a module; bytes are per token, of the forward pass unless said otherwise."""

    name: str
    weight: tuple[int, int] = (0, 0)
    """Input and output size of its matrix."""
    others: int = 0
    """Elements of its other parameters: scales and biases."""
    tensors: int = 0
    """The number of its parameters."""
    trained: bool = True
    """Its parameters have gradients."""
    share: float = 1.0
    """Of its parameters: those that have, where a script trains a part, or blocks share them with others."""
    held: float = 2.0
    """Bytes of an element of its matrix."""
    reads: str = ""
    """What its matrix reads, as `Matrix.reads` has it."""
    saves: float = 0.0
    """Bytes saved for backward."""
    saves_input: bool = False
    """That is its input itself, and no copy of it."""
    for_weight: float = 0.0
    """The part of `saves` that only gradients of weights need."""
    stays: float = 0.0
    """Bytes that it holds on to from forward to backward where checkpointing drops what is saved."""
    fixed: float = 0.0
    """Bytes saved for backward, however many tokens there are."""
    makes: float = 0.0
    """Bytes of gradients that its backward creates."""
    ends: float = 0.0
    """Bytes of gradients that are freed after its backward."""
    scratch: float = 0.0
    """Temporary bytes in backward."""
    in_place: bool = False
    """Its backward overwrites what it saved with gradients."""
    casts: int = 0
    """Elements of its matrix of which autocast makes a 16-bit copy."""
    unpacks: float = 0.0
    """Bytes of a copy of its matrix that each pass writes and frees again."""
    beside: bool = False
    """It belongs to an adapter, whose kernels no technique replaces."""

    @property
    def elements(self) -> int:
        return self.weight[0] * self.weight[1] + self.others

    @property
    def gradients(self) -> tuple[int, ...]:
        """Elements of each gradient that its backward creates."""
        sizes = (self.weight[0] * self.weight[1], self.others)
        return tuple(round(self.share * size) for size in sizes if size) if self.trained else ()

    @property
    def gathered(self) -> int:
        """Its parameters in units of 16 bits, in which stage 3 gathers them."""
        return int(self.weight[0] * self.weight[1] * self.held / 2) + self.others


@dataclass(frozen=True, eq=False)
class Block:
    """The operations of one transformer block; two are the same only if they are one object."""

    operations: tuple[Operation, ...]
    reached: bool = True
    """Backward goes through it: itself or an earlier block has something to train."""

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """Elements of each gradient, in the order in which backward creates them."""
        return tuple(size for each in reversed(self.operations) for size in each.gradients)

    @cached_property
    def trained(self) -> int:
        """Elements of its parameters that have gradients."""
        return sum(self.gradients)

    @cached_property
    def num_trained(self) -> int:
        """Tensors of these."""
        return sum(each.tensors for each in self.operations if each.trained)
