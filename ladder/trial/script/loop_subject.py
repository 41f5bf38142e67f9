"""Micro-steps of a script's own loop as the measuring asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from ladder.events.step_policy import CandidateSpec
from ladder.trial.model import set_checkpointing
from ladder.trial.script.samples import Samples
from ladder.trial.subject import Kind, Subject

if TYPE_CHECKING:
    from ladder.trial.script.loops import Loop

Move = Callable[[Any], Any]
"""Puts a batch where the script's own loader would have put it."""


class LoopSubject(Subject):
    """Micro-steps of the script's own loop, on batches of its own samples."""

    def __init__(self, loop: Loop, samples: Samples, move: Move) -> None:
        self._loop, self._samples, self._move = loop, samples, move
        self.is_even = samples.are_alike
        self._to_loop: SimpleQueue[Any] = SimpleQueue()
        self._from_loop: SimpleQueue[None] = SimpleQueue()
        self.num_begun = 0

    def batches(self) -> Iterator[Any]:
        """For the loop: it trains on each before it asks for the next."""
        while True:
            yield from self._loop.trained_on(self._to_loop.get())
            self._from_loop.put(None)

    @property
    def skipped_steps(self) -> int:
        return int(getattr(self._loop.engine, "skipped_steps", 0))

    @property
    def shared_seconds(self) -> float:  # type: ignore[override]
        """What the last micro-step took less than it seems, because the loop saved something: less than nothing."""
        return -self._loop.grip.saves.taken()

    def use(self, candidate: CandidateSpec) -> None:
        self.num_begun += 1
        set_checkpointing(self._loop.model, candidate)

    def share_of_new_lengths(self, candidate: CandidateSpec) -> float:
        return self._samples.share_of_new_lengths(candidate.micro_batch)

    def draw(self, candidate: CandidateSpec, kind: Kind) -> Any:
        return self._move(self._samples.batch(candidate.micro_batch, kind))

    def train_on(self, batch: Any, *, is_boundary: bool) -> torch.Tensor | float:
        self._loop.told_boundary = is_boundary
        self._to_loop.put(batch)
        self._from_loop.get()
        loss: torch.Tensor | float = self._loop.loss
        return loss
