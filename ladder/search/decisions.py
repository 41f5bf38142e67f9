"""The decisions that a policy can make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ladder.candidates import Candidate, Engine
from ladder.events.outcome import Record
from ladder.search.space import Space


@dataclass(frozen=True)
class Measure:
    """Start a trial of `engine` on `candidates`, in this order."""

    engine: Engine
    candidates: tuple[Candidate, ...]
    reason: str
    first_within: Mapping[str, float] = field(default_factory=dict)
    """By candidate key: skip it if the first candidate's optimizer step takes more seconds than this."""
    probe: bool = False
    """Use a model with a few layers, to see how fast the engine is (`Space.shallow`)."""
    precise: bool = False
    """Time as many steps as in a proof, to see gains of a few per cent."""


@dataclass(frozen=True)
class Prove:
    """Run `candidate` again, alone, in fresh processes."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Stop:
    """End the search."""

    reason: str
    late: bool = False
    """The time budget ends it, and not what is known of the candidates left."""


Decision = Measure | Prove | Stop
Strategy = Callable[[Space, Sequence[Record]], Measure | Stop]
