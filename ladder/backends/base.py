"""The base class of backends, which are libraries that train engines. Each has a package in `ladder/backends/`.

All other code uses `backend_of` a rung and these methods, and names no backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ladder.candidates import Candidate, Engine, Rung
from ladder.machine.machine_speed import MachineSpeed
from ladder.workload.workload import Workload

Device = Literal["cuda", "cpu"]
START = "start"
"""The name of the moment at which an engine is made. It has to fit too, but a candidate's measured peak is later."""


@dataclass(frozen=True)
class Moment:
    """Bytes allocated at one moment of a step, by part, before calibration."""

    name: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    live: float = 0.0
    """Parameters gathered by stage 3."""


def with_one_dequantised(moments: Sequence[Moment], workload: Workload) -> list[Moment]:
    """Backward holds one quantised matrix in 16 bits at a time (bitsandbytes' MatMul4Bit); at the loss it is freed."""
    largest = 2.0 * workload.weights.largest_quantised
    return [
        replace(moment, buffers=moment.buffers + largest) if moment.name == "backward" else moment for moment in moments
    ]


@dataclass(frozen=True)
class StepTerms:
    """Seconds of the parts of a candidate's step, from the machine's prior, before calibration."""

    compute: float
    ramp: float
    """Additional compute because kernels do not fill the GPU at their start and end; the same for any micro-batch."""
    launch: float
    """Host work to launch the kernels, which is the least time of a micro-step with any batch."""
    reduce: float
    """Reduction of gradients and copying them to the host, in every micro-step."""
    gather: float
    """Gathering stage 3's parameters: the transfers, or the host's work for them if that takes longer."""
    exchange: float
    """Exchanges between ranks in forward and backward, besides gradients and parameters."""
    inputs: float
    """Copying offloaded inputs of layers to the host in forward and back in backward, for which kernels wait."""
    hidden: float
    """The share of `reduce` that overlaps with backward."""
    update: float
    """Work of the last micro-step only: the optimizer, reduction at stages 0 and 1, copying parameters back."""
    doubts: tuple[tuple[str, float], ...]
    """Unknowns that techniques add, as in `Terms`."""


class Backend(ABC):
    """One backend. `rank_module` names the module with its part for the ranks."""

    name: str
    rank_module: str

    def obstacle(self, workload: Workload, rung: Rung) -> str:
        """Why `rung` cannot train `workload`, for a list of rungs that are left out; empty if it can."""
        return ""

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
        """The backend's configuration, for trials and for training. ValueError for an NVMe rung without `nvme_path`."""

    def environment(self, engine: Engine) -> dict[str, str]:
        """Environment variables that training needs, besides those of its techniques."""
        return {}

    @abstractmethod
    def knobs(self, workload: Workload, engine: Engine) -> Mapping[str, bool | int]:
        """The knobs of `engine` and their values."""

    @abstractmethod
    def moments(self, workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
        """The moments at which a rank's memory may peak; the first is the idle engine after its first step."""

    @abstractmethod
    def host_bytes(self, workload: Workload, candidate: Candidate, world_size: int) -> tuple[float, float]:
        """Bytes that all ranks together offload to host memory, and the page-locked part of it."""

    @abstractmethod
    def step_terms(self, workload: Workload, candidate: Candidate, world_size: int, machine: MachineSpeed) -> StepTerms:
        """The seconds of a step's parts."""
