"""Which parameters are gathered when, in one micro-step: what the coordinators of stage 3 and FSDP2 find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fetch:
    """Parameters that are gathered together."""

    issued: int
    """The segment in which the transfer begins."""
    needed: int
    """The first segment that waits for it."""
    elements: int


@dataclass(frozen=True)
class Gathering:
    """All gathering in a micro-step."""

    live: tuple[int, ...]
    """By segment: the most elements that are gathered at the same time, including temporary copies."""
    fetches: tuple[Fetch, ...]


def num_segments(num_layers: int) -> int:
    """Segments: embeddings; layers forward; head and loss with their backward; layers backward; embeddings backward."""
    return 2 * num_layers + 3


def nothing_gathered(num_layers: int) -> Gathering:
    """Where all parameters are there all the time."""
    return Gathering((0,) * num_segments(num_layers), ())
