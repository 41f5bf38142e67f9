"""What the ranks of a simulated trial do: one candidate of a workload, with its settings as numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ladder.candidates import Candidate, Effects, Engine, Rung, Technique
from ladder.events.protocol import TrialSpec
from ladder.simulation.operations import Network
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.simulation.allocation import Ledger
    from ladder.simulation.gathering import Gathering
    from ladder.simulation.step_clock import Rig, StepClock
    from ladder.simulation.zero_stages import Stage


@dataclass(frozen=True)
class Assignment(ABC):
    """One candidate of a workload on `ranks` ranks."""

    workload: Workload
    candidate: Candidate
    ranks: int

    @property
    def stage(self) -> int:
        return self.candidate.engine.rung.stage

    @classmethod
    @abstractmethod
    def engine_in(
        cls, spec: TrialSpec, rungs: Sequence[Rung], workload: Workload, techniques: tuple[Technique, ...]
    ) -> Engine:
        """The engine of one of `rungs` that a trial's `spec` describes, with knobs that differ from our defaults."""

    @abstractmethod
    def stage_on(self, ledger: Ledger) -> Stage:
        """What it allocates beside activations."""

    @property
    @abstractmethod
    def gathering(self) -> Gathering:
        """Which parameters are gathered when, in one micro-step."""

    @abstractmethod
    def clock(self, rig: Rig) -> StepClock:
        """The times of its steps."""

    @property
    @abstractmethod
    def pinned(self) -> list[float]:
        """Bytes of each buffer in page-locked memory, before they are rounded up."""

    @property
    def autocasts(self) -> bool:
        """Whether fp32 weights are cast for each product."""
        return False

    @property
    def loaded(self) -> float:
        """Bytes of a rank's part of a model that is read on the host."""
        return 0.0

    @property
    def masters_in_pages(self) -> bool:
        """Whether master weights that are offloaded are in pageable memory."""
        return False

    @property
    def built_on_host(self) -> float:
        """Bytes of a model that every rank builds there before it moves to the GPU."""
        return 0.0

    @property
    def built_in_shards(self) -> float:
        """Bytes of a model that is divided while it is built."""
        return 0.0

    @property
    def moved_to_host(self) -> float:
        """Bytes of a rank's part of the parameters that are offloaded after they were built on the GPU."""
        return 0.0

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
            own = {name: value for name, value in vars(technique.effects).items() if value != getattr(neutral, name)}
            combined = replace(combined, **own)
        return combined

    @cached_property
    def network(self) -> Network:
        return Network(self.workload, self.effects, self.autocasts)

    @property
    def trained(self) -> int:
        """Elements that have a gradient and states of the optimizer."""
        return self.workload.weights.trained

    @property
    def held(self) -> float:
        """Bytes of all parameters as the forward pass uses them."""
        return self.workload.weights.bytes_held

    @property
    def stored(self) -> float:
        """Bytes of all parameters as plain torch stores them: those that are trained in fp32."""
        return self.held + self.workload.weights.bytes_widened + 2.0 * self.trained

    @property
    def stream_bytes(self) -> float:
        """Of a value on the residual stream: fp32 embeddings begin an fp32 stream under autocast."""
        return 4.0 if self.autocasts and (self.workload.lora is None or self.workload.prepare_kbit) else 2.0

    @property
    def gradient_bytes(self) -> float:
        """Of an element of a gradient as autograd accumulates it, which is of its parameter's type."""
        return 4.0 if self.autocasts else 2.0

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
        return 2.0 * self.share if self.workload.weights.is_whole else self.held / self.owners

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-step on one rank."""
        whole = self.candidate.micro_batch * self.workload.seq_len
        return whole // self.ranks if self.effects.shares_sequence else whole

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
        return 0 if self.workload.optimizer == "sgd" else 2

    @property
    def bucket(self) -> int:
        """Elements of the bucket in which gradients are reduced."""
        return int(self.knobs.get("reduce_bucket_size", 500_000_000))
