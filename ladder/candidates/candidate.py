"""Engines and candidates, and the keys they have in tables and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from ladder.candidates.rungs import Knob, Rung
from ladder.candidates.technique import SLOTS, Technique

HALF = 2
"""Partial checkpointing: every second layer is computed again. Chosen: the middle between all layers and none."""
CHECKPOINTING = {"off": (0, False), "on": (1, False), f"1/{HALF}": (HALF, False), "cpu": (1, True)}
"""By name, `Candidate.checkpoint_every` and `Candidate.offload_activations`."""
_CHECKPOINTING_NAMES = {kind: name for name, kind in CHECKPOINTING.items()}


@dataclass(frozen=True)
class Engine:
    """A rung plus DeepSpeed knobs that differ from our defaults, and techniques; one `deepspeed.initialize`."""

    rung: Rung
    knobs: tuple[Knob, ...] = ()
    techniques: tuple[Technique, ...] = ()
    """In the order of their slots."""

    @property
    def name(self) -> str:
        """The key without knobs."""
        return "+".join([self.rung.name, *(technique.name for technique in self.techniques)])

    def having(self, technique: Technique) -> Engine:
        """The same with `technique`, in the place of another one of its slot."""
        others = [each for each in self.techniques if each.slot != technique.slot]
        in_order = sorted([*others, technique], key=lambda each: SLOTS.index(each.slot))
        return replace(self, techniques=tuple(in_order))

    def has_slot_of(self, technique: Technique) -> bool:
        """Whether it has a technique of the same slot."""
        return any(each.slot == technique.slot for each in self.techniques)

    @property
    def shares_sequences(self) -> bool:
        return any(technique.shares_sequences for technique in self.techniques)

    def ranks_of_a_sequence(self, world_size: int) -> int:
        """How many of the ranks work on one sequence."""
        return world_size if self.shares_sequences else 1

    @property
    def key(self) -> str:
        if not self.knobs:
            return self.name
        return f"{self.name}[{','.join(f'{name}={value}' for name, value in sorted(self.knobs))}]"

    @property
    def cautions(self) -> tuple[str, ...]:
        """What the user has to know of it where it is not used as the plain rung is, numerics first."""
        in_order = sorted(self.techniques, key=lambda technique: not technique.changes_numerics)
        return tuple(technique.consent.caution for technique in in_order if technique.consent.caution)

    @property
    def states(self) -> str:
        """The same for engines whose parameters, gradients and optimizer are kept alike: the rest are activations."""
        return replace(self, techniques=tuple(each for each in self.techniques if each.changes_states)).key

    @property
    def numerics(self) -> tuple[Technique, ...]:
        """The techniques under which it trains in another way than the plain rung."""
        return tuple(technique for technique in self.techniques if technique.changes_numerics)


@dataclass(frozen=True)
class Candidate:
    """An engine with a way of checkpointing and a micro-batch; accumulation follows from the global batch."""

    engine: Engine
    checkpoint_every: int
    """Layers of which one is computed again in backward: 1 for each of them, 0 for none."""
    micro_batch: int
    """Sequences a rank takes at once, or all that share them."""
    accumulation: int
    """Micro-batches to one optimizer step."""
    offload_activations: bool = False
    """What checkpointing keeps, the input of each layer, waits for backward in the host's memory."""

    @property
    def key(self) -> str:
        return f"{self.engine.key} {self.variant}"

    @property
    def variant(self) -> str:
        return variant_name(self.checkpointing, self.micro_batch)

    @property
    def checkpointing(self) -> str:
        """In a word: on, off, the share of the layers, or cpu where what is kept is offloaded."""
        return checkpointing_name(self.checkpoint_every, self.offload_activations)

    @property
    def checkpointed(self) -> float:
        """The share of the layers that are computed again."""
        return 1 / self.checkpoint_every if self.checkpoint_every else 0.0

    @property
    def setup(self) -> tuple[Engine, bool]:
        """What all candidates of one trial have in common: the engine, and whether it accumulates.

        An engine that does keeps gradients from micro-step to micro-step also for a candidate that does not, which
        would seem to need more memory than it does. Stage 3 has room for them all in any case.
        """
        return self.engine, self.accumulation > 1 or self.engine.rung.stage == 3

    def sequences(self, world_size: int) -> int:
        """What all ranks together take in an optimizer step: the global batch."""
        return self.micro_batch * self.accumulation * world_size // self.engine.ranks_of_a_sequence(world_size)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether any layer is."""
        return self.checkpoint_every > 0


def checkpointing_name(checkpoint_every: int, offload_activations: bool) -> str:
    """As `Candidate.checkpointing`. KeyError for what no candidate has."""
    return _CHECKPOINTING_NAMES[checkpoint_every, offload_activations]


def variant_name(checkpointing: str, micro_batch: int) -> str:
    """What a candidate's key says beside its engine."""
    return f"ckpt={checkpointing} mb={micro_batch}"


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    # Each has a partner above the root: to count up to `number` itself takes hours for a large batch.
    return sorted({*small, *(number // d for d in small)})


def candidates_of(engine: Engine, sequences: int, micro_batches: Sequence[int]) -> Iterator[Candidate]:
    """Candidates of `engine` that checkpoint all layers or none, at each micro-batch.

    `sequences` are those of an optimizer step that a rank takes, or all that share them; each micro-batch divides it.
    """
    for every in (1, 0):
        for micro_batch in micro_batches:
            yield Candidate(engine, every, micro_batch, sequences // micro_batch)
