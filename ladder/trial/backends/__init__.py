"""The parts of the backends that run in the ranks, one file each."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec

USUAL_COLLECTIVES = {"cuda": "nccl", "cpu": "gloo"}
"""By device."""


class Training(Protocol):
    """A model in training, wrapped by its backend."""

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because gradients overflowed."""

    def __call__(self, **batch: Any) -> Any:
        """The model's output."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None:
        """End a micro-step; the optimizer steps once enough of them were accumulated."""

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def gather(self, save_folder: str | None) -> None:
        """Gather the full 16-bit weights on rank 0's host as a save does; write them only if `save_folder` is given.

        Adapters alone are gathered, saved and loaded again.
        """


class RankBackend(Protocol):
    """The interface of a backend's module."""

    def weights_type(self, spec: TrialSpec) -> torch.dtype:
        """In which type the model is built."""

    def build_device(self, spec: TrialSpec) -> str:
        """Where the model is built."""

    def collectives(self, spec: TrialSpec) -> str:
        """What torch's process group exchanges tensors with."""

    def join(self, spec: TrialSpec) -> None:
        """Called after the process group is initialised and before memory is limited."""

    def start(self, model: PreTrainedModel, spec: TrialSpec) -> Training:
        """Wrap `model` for training."""


def backend_of(spec: TrialSpec) -> RankBackend:
    """The backend that `spec` names."""
    found: RankBackend = importlib.import_module(spec.backend_module).BACKEND
    return found
