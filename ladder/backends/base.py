"""The base class of backends, which are libraries that train engines. Each has a package in `ladder/backends/`.

All other code uses `backend_of` a rung and these methods, and names no backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.candidates import Candidate, Engine, Export, Rung, Technique
from ladder.step.assignment import Assignment
from ladder.step.counted import Device
from ladder.step.host import host_use
from ladder.step.ledger import Moment
from ladder.step.walk import as_on_cpu, walked
from ladder.workload.lora import Lora
from ladder.workload.trained import LoadIn
from ladder.workload.workload import Dtype, OptimizerName, Workload

Choices = Mapping[str, tuple[bool | int, ...]]
"""By knob: the values to choose from in ascending order, including our default."""


@dataclass(frozen=True, kw_only=True)
class EmittedTraining:
    """What the emitted files contain of a training that depends on its backend."""

    rung: Rung
    techniques: tuple[Technique, ...]
    dtype: Dtype
    accumulation: int
    world_size: int
    num_nodes: int = 1
    device: Device
    lora: Lora | None = None
    load_in: LoadIn | None = None
    prepare_kbit: bool = False


@dataclass(frozen=True)
class Flaw:
    """Versions of a package with which some rungs train wrongly, or not at all."""

    package: str
    versions: str
    """As PEP 440 specifies them."""
    why: str
    """The end of a sentence, with the source."""
    concerns: Callable[[Workload, Rung], bool]


class Backend(ABC):
    """One backend. `rank_module` names the module with its part for the ranks."""

    name: str
    rank_module: str
    rungs: tuple[Rung, ...]
    """In the order in which they are tried and listed."""
    option = ""
    """What `--backend` calls it; empty if its rungs are tried with `--backend all` only."""
    help = ""
    """What that does: the end of a sentence for the option's help."""
    package = ""
    """What has to be installed for it, beside torch, transformers and accelerate."""
    one_rank_needs_no_stage = False
    """With one rank, which has nothing to divide, its other stages add work to stage 0 and take none away."""

    def title(self, rung: Rung) -> str:
        """What people call `rung`, without its offload: the beginning of a sentence."""
        return rung.name

    # Whether a rung can be tried

    def place_obstacle(self, rung: Rung, device: str, world_size: int, *, own_script: bool = False) -> str:
        """Why `rung` is not tried with so many GPUs or CPU ranks; empty if it is.

        `own_script`: what is trained is a script of the user's.
        """
        return ""

    def obstacle(self, workload: Workload, rung: Rung) -> str:
        """Why `rung` cannot train `workload`, for a list of rungs that are left out; empty if it can."""
        return ""

    def flaws(self, workload: Workload) -> tuple[Flaw, ...]:
        """What its packages train wrongly in some versions."""
        return ()

    def caution(self, workload: Workload, rung: Rung) -> str:
        """What to know of an answer on `rung`, for its warnings; empty if there is nothing."""
        return ""

    def operators(self, rung: Rung, optimizer: OptimizerName) -> tuple[str, ...]:
        """The operators of DeepSpeed that must be built for `rung`, by our names for them."""
        return ()

    # How it trains

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

    def engine_in(
        self, config: Mapping[str, Any], workload: Workload, world_size: int, techniques: tuple[Technique, ...]
    ) -> Engine:
        """The engine of which `configuration` made `config`, with the knobs that differ from our defaults."""
        return Engine(self.rungs[0], (), techniques)

    def environment(self, engine: Engine) -> dict[str, str]:
        """Environment variables that training needs, besides those of its techniques."""
        return {}

    def knobs(self, workload: Workload, engine: Engine, world_size: int) -> Mapping[str, bool | int]:
        """The knobs of `engine` and their values."""
        return {}

    def knob_choices(self, workload: Workload, engine: Engine, world_size: int) -> Choices:
        """The knobs of `engine` that are worth turning."""
        return {}

    def knobs_in_doubt(self, candidate: Candidate, world_size: int, device: Device) -> Mapping[str, bool | int]:
        """Knobs of `candidate` for which our default is the slower choice on some machines, with the other choice."""
        return {}

    # What it costs

    @abstractmethod
    def assignment(
        self, workload: Workload, candidate: Candidate, world_size: int, device: Device = "cuda"
    ) -> Assignment:
        """What a rank does in a step of `candidate`, from which its memory and its time follow."""

    def moments(self, workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
        """The moments at which a rank's memory may peak; the first is the idle engine after its first step."""
        key = ("moments", self.name, candidate, world_size, device)
        return workload.remembered(key, lambda: self._moments(workload, candidate, world_size, device))

    def _moments(self, workload: Workload, candidate: Candidate, world_size: int, device: Device) -> list[Moment]:
        found = walked(self.assignment(workload, candidate, world_size, device))
        if device == "cuda":
            return found
        return as_on_cpu(found, self.host_bytes(workload, candidate, world_size)[0] / world_size)

    def host_bytes(self, workload: Workload, candidate: Candidate, world_size: int) -> tuple[float, float]:
        """Bytes that all ranks together have in host memory beside their processes, and the page-locked part of it."""
        key = ("host", self.name, candidate, world_size)
        use = workload.remembered(key, lambda: host_use(self.assignment(workload, candidate, world_size)))
        return use.held * world_size, use.pinned * world_size

    # Its words in the emitted files

    def for_file(
        self, config: dict[str, Any], workload: Workload, rung: Rung, device: str, learning_rate: float | None
    ) -> dict[str, Any]:
        """A `configuration` as its file has it: with an optimizer too if there is a `learning_rate`."""
        return config

    def divides_weights(self, rung: Rung) -> bool:
        """Whether each rank keeps a part of them only."""
        return rung.stage == 3

    @abstractmethod
    def trainer_arguments(self, training: EmittedTraining, config: str | Mapping[str, Any]) -> dict[str, Any]:
        """TrainingArguments that choose it; `config` is the path of its configuration, or that itself."""

    @abstractmethod
    def accelerate_config(self, training: EmittedTraining, config: str) -> dict[str, Any]:
        """Keys of accelerate's file that choose it."""

    def launch_options(self, training: EmittedTraining, config: str) -> str:
        """Options of `accelerate launch` beside its file."""
        return f"--gradient_accumulation_steps {training.accumulation}"

    def about_weights(self, training: EmittedTraining) -> tuple[str, str]:
        """For the explanation in a launch script: a line on how to load weights, and what else follows from them."""
        return "", ""

    def export(self, program: str, training: EmittedTraining, config: str) -> Export | str:
        """What an export for `program` contains besides the Trainer's arguments, or why it is impossible."""
        return Export({})
