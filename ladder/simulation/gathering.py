"""Which parameters stage 3 has gathered at each moment, by simulating DeepSpeed's coordinator for one micro-step.

The rules are those of DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py): a module's parameters are
fetched, the next ones are prefetched while fewer than the cap are live, and used parameters are released unless they
are used again within the reuse distance or are already prefetched for a later use.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from ladder.simulation.assignment import Assignment


@dataclass(frozen=True)
class Visit:
    """The execution of a module with a matrix: in forward, in recomputation or in backward."""

    segment: int
    """Its segment of the micro-step; see `num_segments`."""
    parameter: tuple[int, int]
    """Layer and index in it; layers -1 and -2 stand for the embeddings and the head."""
    elements: int


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


def gathering_of(assignment: Assignment) -> Gathering:
    """The gathering for stage 3; empty for other stages, and for one rank with its parameters on the GPU."""
    segments = num_segments(assignment.workload.model.num_layers)
    if assignment.stage < 3 or (assignment.ranks == 1 and assignment.parameter_device == "none"):
        return Gathering((0,) * segments, ())
    return _Coordinator(assignment, _visits(assignment), segments).play()


def known_gathering(assignment: Assignment) -> Gathering:
    """`gathering_of`, cached for all micro-batches."""
    return gathering_of(assignment) if assignment.stage < 3 else _played(_Key(assignment))


class _Key:
    """A cache key: an assignment, compared by what the gathering depends on."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        workload, engine = assignment.workload, assignment.candidate.engine
        model, partly = workload.model, (workload.lora, workload.load_in, workload.freeze)
        shape = (model.model_type, model.num_parameters, model.num_layers, model.hidden_size, model.vocab_size)
        self._facts = (
            *(shape, partly, engine.rung, engine.knobs),
            *(assignment.candidate.checkpoint_every, assignment.ranks),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts)


@lru_cache(maxsize=256)
def _played(key: _Key) -> Gathering:
    return gathering_of(key.assignment)


def _visits(assignment: Assignment) -> list[Visit]:
    """The trace of a micro-step, without parameters that stay on every rank."""
    least, layers = assignment.knobs["stage3_param_persistence_threshold"], assignment.workload.model.num_layers
    blocks = assignment.network.blocks
    own = {
        block: [(place, each.gathered) for place, each in enumerate(block.operations) if each.elements > least]
        for block in set(blocks)
    }
    table, head = Visit(0, (-1, 0), assignment.network.table), Visit(layers + 1, (-2, 0), assignment.network.head)
    if assignment.workload.model.tied:
        head = Visit(layers + 1, (-1, 0), assignment.network.table)

    def pass_of(layer: int, segment: int, *, backward: bool) -> list[Visit]:
        visits = [Visit(segment, (layer, place), elements) for place, elements in own[blocks[layer]]]
        return visits[::-1] if backward else visits

    visits = [table]
    for layer in range(layers):
        visits += pass_of(layer, 1 + layer, backward=False)
    visits += [head, head]
    for layer in reversed(range(layers)):
        segment = 2 * layers + 1 - layer
        if not blocks[layer].reached:
            continue
        if assignment.recomputes(layer):
            visits += pass_of(layer, segment, backward=False)
        visits += pass_of(layer, segment, backward=True)
    if not assignment.network.trained_table:
        return visits
    return [*visits, Visit(2 * layers + 2, table.parameter, table.elements)]


class _Coordinator:
    """DeepSpeed's coordinator with a complete trace, that is, from the second micro-step on."""

    def __init__(self, assignment: Assignment, visits: list[Visit], segments: int) -> None:
        self._visits, self._segments = visits, segments
        self._ahead = int(assignment.knobs["stage3_prefetch_bucket_size"])
        self._cap = int(assignment.knobs["stage3_max_live_parameters"])
        self._reuse = int(assignment.knobs["stage3_max_reuse_distance"])
        self._next_use = _next_uses(visits)
        self._before = [0]
        for visit in visits:
            self._before.append(self._before[-1] + visit.elements)
        self._available: dict[tuple[int, int], int] = {}
        self._fetched_for: dict[tuple[int, int], int] = {}
        self._live = 0
        self._arriving: dict[tuple[int, int], list[int]] = {}
        """By parameter that is being gathered: the sizes of all parameters in the same transfer."""
        self._copies = assignment.ranks > 1

    def play(self) -> Gathering:
        most, fetches = [0] * self._segments, list[Fetch]()
        queue = deque(range(len(self._visits)))
        for step, visit in enumerate(self._visits):
            if visit.parameter not in self._available:
                self._take(visit)
                fetches.append(Fetch(visit.segment, visit.segment, visit.elements))
            while queue and queue[0] <= step:
                queue.popleft()
            ahead = self._prefetch(step, queue)
            if ahead is not None:
                fetches.append(ahead)
            most[visit.segment] = max(most[visit.segment], self._live + self._arrived(visit))
            self._release(step, visit)
        return Gathering(tuple(most), tuple(fetches))

    def _take(self, visit: Visit) -> None:
        self._available[visit.parameter] = visit.elements
        self._live += visit.elements

    def _prefetch(self, step: int, queue: deque[int]) -> Fetch | None:
        room, number, needed = min(self._cap - self._live, self._ahead), 0, -1
        piece: list[int] = []
        while queue and number < room:
            later = queue.popleft()
            visit = self._visits[later]
            self._fetched_for[visit.parameter] = later
            if visit.parameter not in self._available:
                self._take(visit)
                number += visit.elements
                piece.append(visit.elements)
                self._arriving[visit.parameter] = piece
                needed = visit.segment if needed < 0 else needed
        return Fetch(self._visits[step].segment, needed, number) if number else None

    def _arrived(self, visit: Visit) -> int:
        """Elements that exist twice: several parameters of one transfer are copied apart when the first is needed."""
        piece = self._arriving.pop(visit.parameter, [])
        twice = sum(piece) if self._copies and len(piece) > 1 else 0
        piece.clear()
        return twice

    def _release(self, step: int, visit: Visit) -> None:
        if self._fetched_for.get(visit.parameter, -1) > step:
            return
        again = self._next_use[step]
        if again is not None and self._before[again] - self._before[step + 1] < self._reuse:
            return
        self._live -= self._available.pop(visit.parameter, 0)


def _next_uses(visits: list[Visit]) -> list[int | None]:
    latest: dict[tuple[int, int], int] = {}
    following: list[int | None] = [None] * len(visits)
    for step in reversed(range(len(visits))):
        following[step] = latest.get(visits[step].parameter)
        latest[visits[step].parameter] = step
    return following
