"""The rank's halves of the techniques, one file each."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec


class RankTechnique:
    """What a technique does in a rank; each default does nothing."""

    evaluation_arguments: dict[str, Any] = {}  # noqa: RUF012  # replaced by those who need it, never changed
    """What the Trainer adds to the model's call where it wants the loss alone."""

    def prepare(self) -> None:
        """Import what no server may: what touches CUDA, or takes memory that is no tensor's."""

    def change_model(self, model: PreTrainedModel) -> None:
        """Change the model before DeepSpeed gets it. RuntimeError where that would have no effect."""

    def process_groups(self, model: PreTrainedModel, spec: TrialSpec) -> Any:
        """The groups of ranks for DeepSpeed; None for the usual ones."""
        return None

    def make_optimizer(
        self, groups: list[dict[str, Any]], rate: float, spec: TrialSpec
    ) -> torch.optim.Optimizer | None:
        """The optimizer in the place of the usual one; None to leave it."""
        return None

    def check_optimizer(self, optimizer: Any) -> None:
        """RuntimeError where the optimizer that DeepSpeed made of it would silently do something else."""

    def own_batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank trains on, of a batch that it drew."""
        return batch

    def whole_loss(self, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss to go backward from, of that of `own_batch`."""
        return loss

    def evaluation_batch(self, batch: dict[str, torch.Tensor], spec: TrialSpec) -> dict[str, torch.Tensor]:
        """What this rank evaluates."""
        return batch


def techniques_of(spec: TrialSpec) -> list[RankTechnique]:
    """The halves that `spec` names."""
    return [importlib.import_module(module).TECHNIQUE for module in spec.rank_modules]
