"""What a way of checkpointing is, beside all layers and none. Each stands in a module of `ladder/techniques/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ladder.candidates.candidate import CHECKPOINTING, Candidate
from ladder.candidates.problem import Problem
from ladder.candidates.technique import Export


class WayOfCheckpointing:
    """One way; its numbers stand in `CHECKPOINTING` under its name."""

    name = ""
    """In a key: `ckpt=name`."""
    since = ""
    """The version of transformers whose Trainer can be told of it."""
    in_words = ""
    """What a script sets on its model."""
    is_more_frugal = False
    """It takes less GPU memory than checkpointing all layers."""

    def suits(self, problem: Problem) -> bool:
        """Whether candidates can be checkpointed so."""
        return True

    def candidates(
        self, problem: Problem, usual: Sequence[Candidate], peak: Callable[[Candidate], int]
    ) -> list[Candidate]:
        """Those to try in addition to the `usual` ones of an engine; `peak` predicts the bytes of a rank."""
        return [self.of(candidate) for candidate in usual if candidate.checkpointing == "on"]

    def of(self, candidate: Candidate) -> Candidate:
        """`candidate`, checkpointed so."""
        every, offload = CHECKPOINTING[self.name]
        return replace(candidate, checkpoint_every=every, offload_activations=offload)

    def trainer_options(self) -> dict[str, Any]:
        """Of the Trainer's `gradient_checkpointing_kwargs`."""
        return {}

    def export(self, program: str) -> Export | str:
        """As `Technique.export`."""
        return Export({})
