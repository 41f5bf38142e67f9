"""Simulated machines, read from configs/machines/NAME.yaml, for `ladder plan` and the simulated launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ladder.errors import UsageError
from ladder.machine.described import Gpu, Machine
from ladder.text import instead_of
from ladder.units import parse_bytes

Difference = Literal["no overlap", "half link", "slow host", "fragments", "second copy"]
DIFFERENCES: tuple[Difference, ...] = get_args(Difference)
"""In what a machine can differ from a step as it is described: nothing overlaps; links have half of their rate; Python
is slow; the allocator fragments; the head's weight is held twice. All were seen on real machines."""


class SimulatedMachine(BaseModel):
    """A machine of one or more equal nodes. Speeds are per GPU, in bytes or operations per second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpu_name: str
    """As the driver reports it."""
    gpu_memory: int
    """Bytes of one GPU."""
    num_gpus: int = Field(ge=1)
    """Per node."""
    flops: float = Field(gt=0)
    """Dense 16-bit operations, as the vendor states them."""
    device_bytes: float = Field(gt=0)
    """Memory bandwidth of the GPU."""
    link_bytes: float = Field(gt=0)
    """Between the GPUs of a node."""
    network_bytes: float = Field(default=25e9, gt=0)
    """Between nodes."""
    pcie_bytes: float = Field(gt=0)
    """Between a GPU and pinned host memory."""
    host_memory: int
    """Bytes per node."""
    num_cores: int = Field(ge=1)
    """Per node."""
    nvme_bytes: float = Field(default=3e9, gt=0)
    """Bandwidth of the node's drive."""
    nvme_space: int = 0
    """Free bytes of the drive; 0 for no NVMe rungs."""
    noise: float = Field(default=0.01, ge=0, le=0.5)
    """Relative noise of a step's time."""
    rank_spread: float = Field(default=0.01, ge=0, le=0.5)
    """How much more memory one rank needs than the others, as a fraction."""
    crash_rate: float = Field(default=0.0, ge=0, le=1)
    """The probability that a rank crashes without a report, per candidate."""
    hang_rate: float = Field(default=0.0, ge=0, le=1)
    """The probability that the ranks hang, per candidate."""
    surprise: float = Field(default=1.0, ge=0, le=3)
    """How much the machine differs from its data sheet; 0 for not at all."""
    differs: Difference | None = None
    """In what its steps have another structure than described."""
    seed: int = 0
    """Machines with different seeds differ from their data sheets in different ways."""

    @field_validator("gpu_memory", "host_memory", "nvme_space", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    def machine(
        self,
        num_gpus: int | None = None,
        *,
        gpu_memory: int | None = None,
        host_memory: int | None = None,
        nvme_path: Path | None = None,
    ) -> Machine:
        """This machine for a tune, with `num_gpus` in as many nodes as needed; sizes in bytes."""
        world_size = num_gpus or self.num_gpus
        nodes = -(-world_size // self.num_gpus)
        memory = gpu_memory or self.gpu_memory
        if memory > self.gpu_memory:
            has = f"the {self.gpu_memory / 2**30:.0f} GiB that {self.name} has"
            raise UsageError(f"--gpu-memory is more than {has}; leave one of them out.")
        return Machine(
            device="cuda",
            world_size=world_size,
            gpus=tuple(Gpu(f"GPU-simulated-{rank}", self.gpu_name, self.gpu_memory) for rank in range(world_size)),
            memory_limit=memory,
            host_memory=host_memory or self.host_memory * nodes,
            num_cores=self.num_cores * nodes,
            num_nodes=nodes,
            nvme_path=(nvme_path or Path("/simulated-nvme")) if self.nvme_space else None,
        )


def machine_files() -> dict[str, Path]:
    """The bundled machines by name, sorted."""
    package = Path(__file__).resolve().parent.parent
    # In a wheel configs/ is inside the package; in a checkout it is beside the package.
    folders = (package / "configs" / "machines", package.parent / "configs" / "machines")
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_machine(text: str) -> SimulatedMachine:
    """The machine with this bundled name or in this YAML file. UsageError if it is unknown or invalid."""
    path = machine_files().get(text.lower()) or Path(text)
    if not path.is_file():
        raise UsageError(
            f"--machine {text} is neither a file nor a bundled machine; {instead_of(text, machine_files())}"
        )
    try:
        facts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"The machine file {path} cannot be read: {str(error).splitlines()[0]}.") from None
    if not isinstance(facts, dict):
        raise UsageError(f"The machine file {path} is not a list of keys and values.")
    try:
        return SimulatedMachine(**{"name": path.stem, **facts})
    except (ValidationError, TypeError) as error:
        raise UsageError(f"The machine file {path} cannot be used: {_problem(error)}.") from None


def _problem(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return "its keys must be words"
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"the key {key!r} is unknown"
    if first["type"] == "missing":
        return f"the key {key!r} is missing"
    return f"{key}: {first['msg']}"
