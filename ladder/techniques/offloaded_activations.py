"""Offloaded activations: the checkpoints, which are the inputs of layers, stay in host memory until backward."""

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
        """Not for encoder-decoder models: the encoder's output is an input of every decoder layer, and each would
        offload it."""
        return problem.device == "cuda" and not problem.workload.model.is_encoder_decoder

    def candidates(
        self, problem: Problem, usual: Sequence[Candidate], peak: Callable[[Candidate], int]
    ) -> list[Candidate]:
        """The smallest micro-batch, if it may not fit with checkpointing alone.

        A larger one cannot win: it saves less time than the copies take.
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
            "it has no setting to keep activations on the host, and this answer does not fit without that; "
            "use --for axolotl or --for trl"
        )


OFFLOADED_ACTIVATIONS = OffloadedActivations()
