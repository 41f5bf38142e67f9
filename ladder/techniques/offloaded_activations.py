"""Activations on the host: what checkpointing keeps, the input of each layer, waits there for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ladder.candidates import Candidate, Export, Problem
from ladder.candidates.checkpointing import WayOfCheckpointing
from ladder.techniques.worth import SURE, WORTH


class OffloadedActivations(WayOfCheckpointing):
    name = "cpu"
    since = "5.23"
    in_words = "on, keeping activations on the host (offload, transformers 5.23 or later)"
    is_more_frugal = True

    def suits(self, problem: Problem) -> bool:
        """An encoder's output is an input of every layer of the decoder, and would be offloaded as often."""
        return problem.device == "cuda" and not problem.workload.model.is_encoder_decoder

    def candidates(
        self, problem: Problem, usual: Sequence[Candidate], peak: Callable[[Candidate], int]
    ) -> list[Candidate]:
        """The smallest micro-batch, where checkpointing alone is not sure to make it fit.

        A larger one saves less time than the copies take, so it could win nothing.
        """
        checkpointed = [candidate for candidate in usual if candidate.checkpointing == "on"]
        smallest = min(checkpointed, key=lambda candidate: candidate.micro_batch)
        offloading = self.of(smallest)
        kept, rest, limit = peak(smallest), peak(offloading), problem.memory_limit
        is_needed = kept > limit or (kept > SURE * limit and kept - rest > WORTH * limit)
        return [offloading] if is_needed and rest <= limit else []

    def trainer_options(self) -> dict[str, Any]:
        return {"offload": True}

    def export(self, program: str) -> Export | str:
        if program != "llama-factory":
            return Export({})
        return (
            "this answer keeps activations on the host, which it cannot be told, and without that they would not fit; "
            "take --for axolotl or --for trl"
        )


OFFLOADED_ACTIVATIONS = OffloadedActivations()
