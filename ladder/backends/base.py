"""What a backend is: a library that trains an engine. Each stands in a room of `ladder/backends/`.

Everybody else asks these methods of `backend_of` a rung and names no backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ladder.candidates import Candidate, Engine
from ladder.machine.machine_speed import MachineSpeed
from ladder.workload.workload import Workload

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Moment:
    """Bytes allocated at one moment, by part, before any correction."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    live: float = 0.0
    """Parameters gathered by stage 3."""


@dataclass(frozen=True)
class StepTerms:
    """Seconds of a candidate's parts by the machine's prior, before any correction."""

    compute: float
    ramp: float
    """What compute takes more because kernels of a finite batch do not fill the GPU: the same for any micro-batch."""
    launch: float
    """Host work to start the kernels: the least a micro-step takes, however small its batch."""
    reduce: float
    """Reduction of gradients, and their way to the host, in every micro-step."""
    gather: float
    """Stage 3's parameters: the transfers, or the host's work for them where that takes longer."""
    exchange: float
    """What ranks exchange in forward and backward besides gradients and parameters."""
    inputs: float
    """Of layers, on their way to the host in forward and back in backward: the kernels wait for them."""
    hidden: float
    """The share of `reduce` that runs beside backward."""
    update: float
    """All that only the boundary does: the optimizer, reduction at stages 0 and 1, parameters on their way back."""
    doubts: tuple[tuple[str, float], ...]
    """What the techniques leave unknown, as in `Terms`."""


class Backend(ABC):
    """One backend. Its half in the ranks is the module that `rank_module` names."""

    name: str
    rank_module: str

    @abstractmethod
    def configuration(
        self,
        workload: Workload,
        engine: Engine,
        *,
        micro_batch: int,
        accumulation: int,
        world_size: int,
        nvme_path: Path | None,
    ) -> dict[str, Any]:
        """What the backend is started with, here and in training.

        ValueError for a rung that swaps to a drive without an `nvme_path`.
        """

    @abstractmethod
    def knobs(self, workload: Workload, engine: Engine) -> Mapping[str, bool | int]:
        """The settings of `engine` that can be turned, with their values."""

    @abstractmethod
    def moments(self, workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
        """The moments at which a rank may hold the most; the first is the engine at rest after its first step."""

    @abstractmethod
    def host_bytes(self, workload: Workload, candidate: Candidate, world_size: int) -> tuple[float, float]:
        """What all ranks together keep in host memory, in bytes, and the page-locked part of it."""

    @abstractmethod
    def step_terms(self, workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
        """The seconds of a step's parts."""
