"""Which parameters stage 3 has gathered at each moment, by simulating DeepSpeed's coordinator for one micro-step.

The rules are those of DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py): a module's parameters are
fetched, the next ones are prefetched while fewer than the cap are live, and used parameters are released unless they
are used again within the reuse distance or are already prefetched for a later use.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ladder.step.assignment import Assignment
from ladder.step.gathering import Fetch, Gathering, nothing_gathered, num_segments

_LEAST, _AHEAD, _CAP, _REUSE = SETTINGS = (
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""The knobs on which gathering depends."""


@dataclass(frozen=True)
class Visit:
    """The execution of a module with a matrix: in forward, in recomputation or in backward."""

    segment: int
    """Its segment of the micro-step; see `num_segments`."""
    parameter: tuple[int, int]
    """Layer and index in it; layers -1 and -2 stand for the embeddings and the head."""
    elements: int


def gathering_of(assignment: Assignment) -> Gathering:
    """The gathering for stage 3; empty for other stages, and for one rank with its parameters on the GPU."""
    layers = assignment.workload.model.num_layers
    if assignment.stage < 3 or (assignment.ranks == 1 and assignment.parameter_device == "none"):
        return nothing_gathered(layers)
    return _Coordinator(assignment, _visits(assignment), num_segments(layers)).play()


def _visits(assignment: Assignment) -> list[Visit]:
    """The trace of a micro-step, without parameters that stay on every rank."""
    least, layers = assignment.knobs[_LEAST], assignment.workload.model.num_layers
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
    # A tied table is not there again until its own backward. Seen with Llama-3.2-1B and long sequences, where it would
    # be another 0.5 GiB (benchmarks/results/1xh200-more-rungs and 2xh200-more-rungs).
    if not assignment.network.trained_table or assignment.workload.model.tied:
        return visits
    return [*visits, Visit(2 * layers + 2, table.parameter, table.elements)]


class _Coordinator:
    """DeepSpeed's coordinator with a complete trace, that is, from the second micro-step on."""

    def __init__(self, assignment: Assignment, visits: list[Visit], segments: int) -> None:
        self._visits, self._segments = visits, segments
        self._ahead = int(assignment.knobs[_AHEAD])
        self._cap = int(assignment.knobs[_CAP])
        self._reuse = int(assignment.knobs[_REUSE])
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
