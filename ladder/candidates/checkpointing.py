"""The base class of ways of checkpointing besides all layers and none. Each has a module in `ladder/techniques/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ladder.candidates.candidate import CHECKPOINTING, Candidate
from ladder.candidates.problem import Problem
from ladder.candidates.technique import Export


class WayOfCheckpointing:
    """One way of checkpointing; `CHECKPOINTING` has its numbers by its name."""

    name = ""
    """In a key: `ckpt=name`."""
    since = ""
    """The first version of transformers whose Trainer has a setting for it."""
    in_words = ""
    """What a script must set on its model, in words."""
    is_more_frugal = False
    """It needs less GPU memory than checkpointing all layers."""

    def suits(self, problem: Problem) -> bool:
        """Whether it can be used for `problem`."""
        return True

    def candidates(
        self, problem: Problem, usual: Sequence[Candidate], peak: Callable[[Candidate], int]
    ) -> list[Candidate]:
        """Candidates to try in addition to the `usual` ones of an engine; `peak` predicts the bytes of a rank."""
        return [self.of(candidate) for candidate in usual if candidate.checkpointing == "on"]

    def of(self, candidate: Candidate) -> Candidate:
        """`candidate` with this way of checkpointing."""
        every, offload = CHECKPOINTING[self.name]
        return replace(candidate, checkpoint_every=every, offload_activations=offload)

    def trainer_options(self) -> dict[str, Any]:
        """Keys for the Trainer's `gradient_checkpointing_kwargs`."""
        return {}

    def export(self, program: str) -> Export | str:
        """As in `Technique.export`."""
        return Export({})
