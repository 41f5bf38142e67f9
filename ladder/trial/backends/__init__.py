"""The parts of the backends that run in the ranks, one file each."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec

_USUAL_COLLECTIVES = {"cuda": "nccl", "cpu": "gloo"}
"""By device."""


class Training(Protocol):
    """A model in training, wrapped by its backend."""

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were skipped because gradients overflowed."""

    def begin(self, *, is_boundary: bool) -> None:
        """Begin a micro-step, with which the optimizer steps if `is_boundary`."""

    def __call__(self, **batch: Any) -> Any:
        """The model's output."""

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None:
        """End a micro-step; the optimizer steps if it is a boundary."""

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def gather(self, save_folder: str | None) -> None:
        """Gather the full 16-bit weights on rank 0's host as a save does; write them only if `save_folder` is given.

        Adapters alone are gathered, saved and loaded again.
        """


class RankBackend(ABC):
    """The base class of what a backend's module calls `BACKEND`."""

    @abstractmethod
    def weights_type(self, spec: TrialSpec) -> torch.dtype:
        """In which type the model is built."""

    @abstractmethod
    def start(self, model: PreTrainedModel, spec: TrialSpec) -> Training:
        """Wrap `model` for training."""

    def build_device(self, spec: TrialSpec) -> str:
        """Where the model is built."""
        return spec.device

    def collectives(self, spec: TrialSpec) -> str:
        """What torch's process group exchanges tensors with."""
        return _USUAL_COLLECTIVES[spec.device]

    def join(self, spec: TrialSpec) -> None:  # noqa: B027 - the process group may be all that is needed
        """Called after the process group is initialised and before memory is limited."""

    def can_be_followed(self, spec: TrialSpec) -> bool:
        """Whether the engine of `spec` leaves a process in which another one can be made, and measured as in a new one.

        What it left in memory is checked besides.
        """
        return False

    def let_go(self, training: Any) -> None:  # noqa: B027 - the processes of most end
        """Take back what `training` registered elsewhere, so that its model can be freed."""

    def divides_weights(self, spec: TrialSpec) -> bool:
        """Whether ranks divide them, packed ones too, which then have to be stored as floating-point numbers."""
        return False

    def take_hold(self, spec: TrialSpec) -> None:  # noqa: B027 - accelerate may do as it is
        """Called in a rank before a script of the user's runs, with the Trainer or with accelerate."""

    def accelerator_options(self, spec: TrialSpec) -> dict[str, Any]:
        """What the Accelerator of a script's own loop is made with, to train with this backend."""
        return {"cpu": spec.device == "cpu", "deepspeed_plugin": None, "fsdp_plugin": None}


def backend_of(spec: TrialSpec) -> RankBackend:
    """The backend that `spec` names."""
    found: RankBackend = importlib.import_module(spec.backend_module).BACKEND
    return found
