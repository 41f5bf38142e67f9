"""What the ranks of an engine do in a step of one candidate, with its settings as numbers.

Each backend has its own kinds, which add what is particular to their engines: see `Backend.assignment`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ladder.candidates import Candidate, Effects
from ladder.machine.machine_speed import MachineSpeed
from ladder.optimizers.registry import OPTIMIZERS
from ladder.step.clock import StepParts
from ladder.step.counted import Device, counted_block
from ladder.step.gathering import Gathering
from ladder.step.ledger import Ledger
from ladder.step.network import Network
from ladder.step.stage import Stage
from ladder.workload.workload import CountedBlock, Workload


@dataclass(frozen=True)
class Assignment(ABC):
    """One candidate of a workload on `ranks` ranks."""

    workload: Workload
    candidate: Candidate
    ranks: int
    device: Device = "cuda"

    @property
    def stage(self) -> int:
        return self.candidate.engine.rung.stage

    @abstractmethod
    def stage_on(self, ledger: Ledger) -> Stage:
        """What it allocates beside activations."""

    @abstractmethod
    def time_on(self, machine: MachineSpeed) -> StepParts:
        """The seconds of a step's parts."""

    @property
    @abstractmethod
    def gathering(self) -> Gathering:
        """Which parameters are gathered when, in one micro-step."""

    def pinned(self) -> Iterable[float]:
        """Bytes of each buffer in page-locked memory, before they are rounded up."""
        return ()

    def pageable(self) -> float:
        """Bytes of what it offloads to other memory of the host."""
        return 0.0

    def disk(self) -> float:
        """Bytes of what it offloads to a drive."""
        return 0.0

    @property
    def loaded(self) -> float:
        """Bytes of a model that a rank reads on the host at first."""
        return 0.0

    @property
    def autocasts(self) -> bool:
        """Whether fp32 weights are cast for each product."""
        return False

    @property
    def optimizer_device(self) -> str:
        return self.candidate.engine.rung.offload_optimizer

    @property
    def parameter_device(self) -> str:
        return self.candidate.engine.rung.offload_param

    @cached_property
    def knobs(self) -> Mapping[str, bool | int]:
        """The settings of `zero_optimization`, if there is one."""
        return {}

    @cached_property
    def effects(self) -> Effects:
        """Those of all techniques of the engine; each technique's module has its own."""
        neutral = Effects()
        combined = neutral
        for technique in self.candidate.engine.techniques:
            effects = technique.effects_beside(self.candidate.engine.techniques)
            own = {name: value for name, value in vars(effects).items() if value != getattr(neutral, name)}
            combined = replace(combined, **own)
        return combined

    @cached_property
    def counted(self) -> CountedBlock:
        """What a block was counted to do."""
        return counted_block(self.workload, self.candidate.engine.techniques, self.device)

    @cached_property
    def network(self) -> Network:
        def build() -> Network:
            return Network(self.workload, self.effects, self.counted, self.autocasts, self.device)

        key = ("network", self.effects, self.counted, self.autocasts, self.device)
        return self.workload.remembered(key, build)

    @property
    def trained(self) -> int:
        """Elements that have a gradient and states of the optimizer."""
        return self.workload.weights.trained

    @property
    def held(self) -> float:
        """Bytes of all parameters as the forward pass uses them."""
        return self.workload.weights.bytes_held

    @property
    def width(self) -> float:
        """Bytes of a value in the precision of the training."""
        return self.workload.width

    @property
    def stored(self) -> float:
        """Bytes of all parameters between steps, on all their owners together."""
        return self.held

    @property
    def stream_bytes(self) -> float:
        """Of a value on the residual stream: fp32 embeddings begin an fp32 stream under autocast."""
        is_wide = self.autocasts and (self.workload.lora is None or self.workload.prepare_kbit)
        return 4.0 if is_wide else self.width

    @property
    def gradient_bytes(self) -> float:
        """Of an element of a gradient as autograd accumulates it, which is of its parameter's type."""
        return 4.0 if self.autocasts else self.width

    @property
    def master_bytes(self) -> float:
        """Of the optimizer's copy of a weight."""
        return self.effects.master_bytes

    @property
    def copied_gradient_bytes(self) -> float:
        """Of the optimizer's copy of a gradient; 0 where it takes the gradient itself."""
        return 0.0 if self.workload.dtype == "fp32" else self.effects.gradient_bytes

    @property
    def state_bytes(self) -> float:
        """Of the optimizer's states of a weight, as Adam's two moments."""
        usual = self.effects.master_bytes
        return self.workload.state_bytes(usual) * self.effects.moment_bytes / usual

    @property
    def group(self) -> int:
        """Ranks of a node that exchange among themselves, or all ranks."""
        return max((technique.ranks for technique in self.candidate.engine.techniques), default=0) or self.ranks

    @property
    def owners(self) -> int:
        """Ranks that divide what is divided."""
        return self.group if self.effects.divided_in_node else self.ranks

    @property
    def share(self) -> int:
        """Elements of a rank's partition of what is trained."""
        return -(-self.trained // self.owners)

    @property
    def held_share(self) -> float:
        """Bytes of a rank's partition of all parameters."""
        return self.held / self.owners

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-step on one rank."""
        whole = self.candidate.micro_batch * self.workload.sample_len
        return whole // self.candidate.engine.ranks_of_a_sequence(self.ranks)

    @property
    def offloaded_input(self) -> float:
        """Bytes of a layer's input that a rank offloads to the host; 0 without offloaded activations."""
        if not self.candidate.offload_activations:
            return 0.0
        return self.width * self.tokens * self.workload.model.hidden_size

    @property
    def accumulates(self) -> bool:
        return self.candidate.accumulation > 1

    def recomputes(self, layer: int) -> bool:
        """Whether a layer is checkpointed: it saves only its input and is recomputed in backward."""
        every = self.candidate.checkpoint_every
        return every > 0 and layer % every == 0

    @property
    def moments(self) -> int:
        """Tensors of optimizer state: Adam's two, or none."""
        return OPTIMIZERS[self.workload.optimizer].moments

    @property
    def bucket(self) -> int:
        """Elements of the bucket in which gradients are reduced."""
        return int(self.knobs.get("reduce_bucket_size", 500_000_000))
