"""Half checkpointing: every second layer is recomputed in backward, the others keep their activations."""

from __future__ import annotations

from typing import Any

from ladder.candidates import HALF, Export
from ladder.candidates.checkpointing import WayOfCheckpointing


class PartialCheckpointing(WayOfCheckpointing):
    name = f"1/{HALF}"
    since = "5.18"
    in_words = f"on for every {HALF} layers (every_n_layers, transformers 5.18 or later)"

    def trainer_options(self) -> dict[str, Any]:
        return {"every_n_layers": HALF}

    def export(self, program: str) -> Export | str:
        if program != "llama-factory":
            return Export({})
        return Export({}, "LLaMA-Factory checkpoints all layers or none: all need less memory, but take longer.")


PARTIAL_CHECKPOINTING = PartialCheckpointing()
