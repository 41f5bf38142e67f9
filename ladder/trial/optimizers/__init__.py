"""How ranks make the optimizers, one file each."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any

import torch

from ladder.events.protocol import TrialSpec


class RankOptimizer(ABC):
    """What an optimizer does in a rank."""

    rate_of_comparison: float
    """The learning rate at which a few steps on one batch change its loss visibly, with gradients clipped as its pure
    half says."""

    @abstractmethod
    def make(self, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
        """The one that the Trainer and accelerate would use."""

    def make_for_host(self, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
        """The same where DeepSpeed keeps its states on the host."""
        return self.make(groups, rate)


def optimizer_of(spec: TrialSpec) -> RankOptimizer:
    """The one that `spec` names."""
    found: RankOptimizer = importlib.import_module(spec.optimizer_module).OPTIMIZER
    return found
