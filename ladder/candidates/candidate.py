"""Engines and candidates, and their keys in tables and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from ladder.candidates.problem import Problem
from ladder.candidates.rungs import Knob, Rung
from ladder.candidates.technique import SLOTS, Technique

HALF = 2
"""Partial checkpointing: every second layer is recomputed. Chosen: the middle between all layers and none."""
CHECKPOINTING = {"off": (0, False), "on": (1, False), f"1/{HALF}": (HALF, False), "cpu": (1, True)}
"""By name: `Candidate.checkpoint_every` and `Candidate.offload_activations`."""
_CHECKPOINTING_NAMES = {kind: name for name, kind in CHECKPOINTING.items()}


@dataclass(frozen=True)
class Engine:
    """A rung with techniques, and with DeepSpeed knobs that differ from our defaults: one `deepspeed.initialize`."""

    rung: Rung
    knobs: tuple[Knob, ...] = ()
    techniques: tuple[Technique, ...] = ()
    """In the order of their slots."""

    @property
    def name(self) -> str:
        """The key without knobs."""
        return "+".join([self.rung.name, *(technique.label for technique in self.techniques)])

    def having(self, technique: Technique) -> Engine:
        """The same engine with `technique`, which replaces another one of the same slot."""
        others = [each for each in self.techniques if each.slot != technique.slot]
        in_order = sorted([*others, technique], key=lambda each: SLOTS.index(each.slot))
        return replace(self, techniques=tuple(in_order))

    def has_slot_of(self, technique: Technique) -> bool:
        """Whether it has a technique of the same slot."""
        return any(each.slot == technique.slot for each in self.techniques)

    def has(self, technique: Technique) -> bool:
        """Whether it has `technique`, with any number of ranks."""
        return any(each.name == technique.name for each in self.techniques)

    @property
    def first_differs(self) -> bool:
        """Whether the first micro-step of an optimizer step takes another time than the following ones."""
        return any(technique.first_differs for technique in self.techniques)

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
        """What the user has to know before training with its techniques; those that change numerics come first."""
        in_order = sorted(self.techniques, key=lambda technique: not technique.changes_numerics)
        return tuple(technique.consent.caution for technique in in_order if technique.consent.caution)

    @property
    def states(self) -> str:
        """A key that is the same for engines that store parameters, gradients and optimizer states in the same way."""
        return replace(self, techniques=tuple(each for each in self.techniques if each.changes_states)).key

    @property
    def numerics(self) -> tuple[Technique, ...]:
        """The techniques that change the numerics of training."""
        return tuple(technique for technique in self.techniques if technique.changes_numerics)


def engines_having(technique: Technique, engines: Sequence[Engine], problem: Problem) -> list[Engine]:
    """`engines` with `technique` added, of those that it suits and that have no technique of its slot."""
    return [
        engine.having(technique.on(problem))
        for engine in engines
        if not engine.has_slot_of(technique) and technique.gets_into(engine.rung, problem)
    ]


@dataclass(frozen=True)
class Candidate:
    """An engine with a way of checkpointing and a micro-batch; accumulation follows from the global batch."""

    engine: Engine
    checkpoint_every: int
    """One of this many layers is recomputed in backward: 1 means every layer, 0 none."""
    micro_batch: int
    """Sequences per rank in a micro-step; with sequence parallelism, of all ranks together."""
    accumulation: int
    """Micro-batches per optimizer step."""
    offload_activations: bool = False
    """Whether the checkpoints, the inputs of layers, are kept in host memory until backward."""

    @property
    def key(self) -> str:
        return f"{self.engine.key} {self.variant}"

    @property
    def variant(self) -> str:
        return variant_name(self.checkpointing, self.micro_batch)

    @property
    def checkpointing(self) -> str:
        """The name in `CHECKPOINTING`: on, off, the share of the layers, or cpu if checkpoints are offloaded."""
        return checkpointing_name(self.checkpoint_every, self.offload_activations)

    @property
    def checkpointed(self) -> float:
        """The share of the layers that are recomputed."""
        return 1 / self.checkpoint_every if self.checkpoint_every else 0.0

    @property
    def setup(self) -> tuple[Engine, bool]:
        """What all candidates of one trial must share: the engine, and whether it accumulates gradients.

        An engine that accumulates keeps gradients between micro-steps, so a candidate without accumulation would seem
        to need more memory than it does, unless its rung always keeps them. If the first micro-step of an optimizer
        step differs, what a step of several tells says nothing of a step with one.
        """
        always = self.engine.rung.keeps_gradients and not self.engine.first_differs
        return self.engine, self.accumulation > 1 or always

    def sequences(self, world_size: int) -> int:
        """The sequences of all ranks in an optimizer step: the global batch."""
        return self.micro_batch * self.accumulation * world_size // self.engine.ranks_of_a_sequence(world_size)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether any layer is checkpointed."""
        return self.checkpoint_every > 0


def checkpointing_name(checkpoint_every: int, offload_activations: bool) -> str:
    """The name for `Candidate.checkpointing`. KeyError for a combination that no candidate has."""
    return _CHECKPOINTING_NAMES[checkpoint_every, offload_activations]


def variant_name(checkpointing: str, micro_batch: int) -> str:
    """The part of a candidate's key after its engine."""
    return f"ckpt={checkpointing} mb={micro_batch}"


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    # Each has a partner above the root; trying all numbers up to a large batch would take hours.
    return sorted({*small, *(number // d for d in small)})


def candidates_of(engine: Engine, sequences: int, micro_batches: Sequence[int]) -> Iterator[Candidate]:
    """Candidates of `engine` that checkpoint all layers or none, with each micro-batch.

    `sequences` is the number per optimizer step and rank, or of all ranks with sequence parallelism; each micro-batch
    divides it.
    """
    for every in (1, 0):
        for micro_batch in micro_batches:
            yield Candidate(engine, every, micro_batch, sequences // micro_batch)
