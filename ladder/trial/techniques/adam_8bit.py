"""8-bit Adam in a rank."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ladder.events.protocol import TrialSpec
from ladder.optimizers.registry import OPTIMIZERS
from ladder.techniques.adam_8bit import MOST_ELEMENTS
from ladder.trial.preload import unhide
from ladder.trial.techniques import RankTechnique


class Adam8Bit(RankTechnique):
    def prepare(self) -> None:
        unhide("bitsandbytes")
        importlib.import_module("bitsandbytes.optim")

    def make_optimizer(
        self, groups: list[dict[str, Any]], rate: float, spec: TrialSpec
    ) -> torch.optim.Optimizer | None:
        import bitsandbytes.optim

        in_8_bits = getattr(bitsandbytes.optim, OPTIMIZERS[spec.optimizer].in_8_bits)
        made: torch.optim.Optimizer = in_8_bits(groups, lr=rate)
        return made

    def check_optimizer(self, optimizer: Any) -> None:
        """RuntimeError if a tensor is so long that bitsandbytes would silently leave most of it unchanged."""
        longest = max((tensor.numel() for group in optimizer.param_groups for tensor in group["params"]), default=0)
        if longest >= MOST_ELEMENTS:
            raise RuntimeError(
                f"bitsandbytes cannot update a tensor of {longest:,} elements; it takes fewer than {MOST_ELEMENTS:,}"
            )


TECHNIQUE = Adam8Bit()
