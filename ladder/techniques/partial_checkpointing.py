"""Half checkpointing: every second layer is computed again in backward, the others keep what they saved."""

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
        return Export({}, "It checkpoints all layers or none: all takes less memory than was measured, and more time.")


PARTIAL_CHECKPOINTING = PartialCheckpointing()
