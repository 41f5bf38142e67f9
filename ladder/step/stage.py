"""The hooks of an engine on one rank: what it allocates at the start, for gradients in backward, and in the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ladder.step.ledger import Ledger
from ladder.step.operation import Block

if TYPE_CHECKING:
    from ladder.step.assignment import Assignment


class Stage(ABC):
    """The hooks of one engine on one rank."""

    def __init__(self, assignment: Assignment, ledger: Ledger) -> None:
        self._assignment, self._ledger = assignment, ledger
        self._on_gpu = assignment.optimizer_device == "none"

    @abstractmethod
    def start(self) -> None:
        """Allocate what the engine has before its first step."""

    @abstractmethod
    def settle(self) -> None:
        """Allocate what remains from earlier steps."""

    @abstractmethod
    def accumulated(self) -> None:
        """Allocate what remains from earlier micro-steps of this step."""

    @abstractmethod
    def gradient(self, elements: int) -> None:
        """Backward has computed the gradient of a parameter."""

    @abstractmethod
    def knows(self, block: Block) -> bool:
        """Whether it will do nothing with the gradients of `block` that it did not do with those of an earlier one."""

    @abstractmethod
    def skip(self, block: Block) -> None:
        """Have what is left of the gradients of a `block` that it knows."""

    def end_of_unit(self) -> None:  # noqa: B027 - DeepSpeed has no such units, so its stages do nothing here
        """Backward has left a block, the head, or the embeddings."""

    @abstractmethod
    def end_of_backward(self) -> None:
        """All gradients are complete."""

    @abstractmethod
    def update(self) -> None:
        """Run the optimizer."""

    def _take_states(self, elements: int) -> None:
        """Allocate the optimizer's states, which it creates in the first step."""
        if self._on_gpu:
            self._ledger.take("states", self._assignment.state_bytes * elements, "optimizer")


class WholeGradients(Stage):
    """An engine on whose ranks gradients stay as backward leaves them, or are added to those of earlier micro-steps."""

    _width: float
    """Bytes of an element of a gradient."""

    def gradient(self, elements: int) -> None:
        if self._assignment.accumulates:
            self._ledger.touch(self._width * elements, "gradients")  # it is added to the accumulated one
        else:
            self._ledger.take("gradients", self._width * elements, "gradients")

    def knows(self, block: Block) -> bool:
        return True

    def skip(self, block: Block) -> None:
        if not self._assignment.accumulates:
            self._ledger.take("gradients", self._width * block.trained, "gradients")
