"""The rank's halves of the backends, one file each."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec


class Training(Protocol):
    """A model under training, as its backend sees it."""

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were left out because gradients overflowed."""

    def __call__(self, **batch: Any) -> Any:
        """The model's output."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None:
        """Of the optimizer, where enough micro-steps were accumulated."""

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def gather(self, save_folder: str | None) -> None:
        """Gather the full 16-bit weights on rank 0's host as a save does; written to disk only under `save_folder`."""


class RankBackend(Protocol):
    """What a backend's module offers."""

    def join(self, spec: TrialSpec) -> None:
        """What has to be done once the process group stands, before memory is limited."""

    def start(self, model: PreTrainedModel, spec: TrialSpec) -> Training:
        """Put `model` under training."""


def backend_of(spec: TrialSpec) -> RankBackend:
    """The half that `spec` names."""
    found: RankBackend = importlib.import_module(spec.backend_module).BACKEND
    return found
