"""The parts of the techniques that run in the ranks, one file each."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec
from ladder.workload.workload import mixed_precision


class UnknownKernelError(Exception):
    """A kernel does what no stand-in does."""


class RankTechnique:
    """What a technique does in a rank. By default it does nothing."""

    evaluation_arguments: dict[str, Any] = {}  # noqa: RUF012  # subclasses replace it, nothing changes it
    """Arguments that the Trainer adds to the model's call when it only needs the loss."""

    first_differs = False
    """The first micro-step of an optimizer step takes another time than the following ones."""

    divides_gradients = False
    """FSDP2 divides gradients in every micro-step, also before the last."""

    compiles = False
    """The first step of a candidate compiles kernels, so its time says nothing of others."""

    can_be_followed = False
    """It leaves a process in which another engine can be made, and measured as in a new one."""

    precision = ""
    """What accelerate calls its mixed precision; empty for that of the trial."""

    def claim_host(self, rank: int, world_size: int) -> None:
        """Called first in a rank, before anything starts threads."""

    def prepare(self) -> None:
        """Import what the server must not import: modules that initialise CUDA or allocate memory outside tensors."""

    def before_model(self) -> None:
        """Called before a model is built: undo what an earlier trial in this process left that would change it."""

    def change_model(self, model: PreTrainedModel) -> None:
        """Change the model before DeepSpeed gets it. RuntimeError if that would have no effect."""

    def stand_in(self, model: PreTrainedModel) -> bool:
        """Put stand-ins for its kernels into `model`, which is on the meta device; False if it does not know the model.

        The loss stays as it was. Nothing without the technique can be counted in this process any more. A stand-in may
        raise UnknownKernelError when it is called.
        """
        return False

    def begin_candidate(self) -> None:
        """Called before the first step of each candidate."""

    def process_groups(self, model: PreTrainedModel, spec: TrialSpec) -> Any:
        """The process groups for DeepSpeed; None for the default ones."""
        return None

    def make_optimizer(
        self, groups: list[dict[str, Any]], rate: float, spec: TrialSpec
    ) -> torch.optim.Optimizer | None:
        """The optimizer to use instead of the usual one; None to keep that."""
        return None

    def check_optimizer(self, optimizer: Any) -> None:
        """RuntimeError if the optimizer, as DeepSpeed wrapped it, would silently do something else."""

    def own_batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The part of `batch` that this rank trains on."""
        return batch

    def whole_loss(self, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss for the backward pass, computed from the loss of `own_batch`."""
        return loss

    def evaluation_batch(self, batch: dict[str, torch.Tensor], spec: TrialSpec) -> dict[str, torch.Tensor]:
        """The part of `batch` that this rank evaluates."""
        return batch


def begin_candidate(techniques: Iterable[RankTechnique]) -> None:
    """Let `techniques` get ready for another candidate."""
    for technique in techniques:
        technique.begin_candidate()


def precision_of(spec: TrialSpec) -> str:
    """The mixed precision of accelerate in which `spec` trains."""
    return next((each.precision for each in techniques_of(spec) if each.precision), mixed_precision(spec.dtype))


def divides_gradients(spec: TrialSpec) -> bool:
    """Whether FSDP2 divides gradients in every micro-step of `spec`."""
    return any(technique.divides_gradients for technique in techniques_of(spec))


def techniques_of(spec: TrialSpec) -> list[RankTechnique]:
    """The techniques that `spec` names."""
    return [importlib.import_module(module).TECHNIQUE for module in spec.rank_modules]
