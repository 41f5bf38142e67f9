"""Which parameters FSDP2 has gathered at each moment, by following torch's hooks for one micro-step.

The rules are those of torch 2.13 (distributed/fsdp/_fully_shard/_fsdp_param_group.py) with accelerate's units: each
block, the embeddings, and the head with the last norm, which stays gathered until its backward; tied embeddings belong
to the head. A gathered unit is copied from a buffer into its parameters. In forward the buffer stays until the next
unit is copied; in backward the unit before is gathered while one is at work. A rank alone casts its own shard into the
parameters when a unit needs them, without a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ladder.step.assignment import Assignment
from ladder.step.gathering import Fetch, Gathering, nothing_gathered, num_segments


@dataclass(frozen=True)
class _Unit:
    elements: int
    forward: int
    """The segment of its forward."""
    backward: int
    """The last segment in which it is needed."""
    stays: bool = False
    """It is not released after its forward."""


def units_gathered(assignment: Assignment) -> Gathering:
    """The gathering of all units in one micro-step; empty for DDP."""
    if assignment.stage == 0:
        return nothing_gathered(assignment.workload.model.num_layers)
    return _Hooks(assignment).play()


def _units(assignment: Assignment) -> list[_Unit]:
    """All units in the order in which forward reaches them."""
    network, model, stays = assignment.network, assignment.workload.model, assignment.stage == 2
    layers, last = model.num_layers, num_segments(model.num_layers) - 1
    head = _Unit(network.table, 0, last, stays=True)
    units = [
        _Unit(sum(each.gathered for each in block.operations), 1 + layer, last - 1 - layer, stays)
        for layer, block in enumerate(network.blocks)
    ]
    if model.tied:
        return [head, *units]
    return [_Unit(network.table, 0, last, stays), *units, _Unit(network.head, layers + 1, layers + 1, stays=True)]


class _Hooks:
    """The hooks before and after a unit's forward and backward."""

    def __init__(self, assignment: Assignment) -> None:
        self._units, self._alone = _units(assignment), assignment.ranks == 1
        self._live = [0] * num_segments(assignment.workload.model.num_layers)
        self._fetches: list[Fetch] = []
        self._held: dict[int, int] = {}
        """Elements of gathered units, by their place."""
        self._sum = 0
        """Of these."""
        self._buffer = 0
        """Elements of the buffer that is kept from the last gathering."""
        self._segment = num_segments(assignment.workload.model.num_layers) // 2
        """Backward's next segment: the first is that of the head."""

    def play(self) -> Gathering:
        for place, unit in enumerate(self._units):
            self._forward(place, unit)
        self._buffer = 0
        for place, unit in reversed(list(enumerate(self._units))):
            self._backward(place, unit)
        return Gathering(tuple(self._live), tuple(self._fetches))

    def _note(self, segment: int, more: int = 0) -> None:
        self._live[segment] = max(self._live[segment], self._sum + self._buffer + more)

    def _forward(self, place: int, unit: _Unit) -> None:
        self._fetches.append(Fetch(unit.forward, unit.forward, unit.elements))
        if not self._alone:
            self._note(unit.forward, more=unit.elements)
            self._buffer = unit.elements
        self._hold(place, unit)
        self._note(unit.forward)
        if not unit.stays:
            self._sum -= self._held.pop(place)

    def _hold(self, place: int, unit: _Unit) -> None:
        self._held[place] = unit.elements
        self._sum += unit.elements

    def _backward(self, place: int, unit: _Unit) -> None:
        if place not in self._held:
            self._hold(place, unit)
            self._note(unit.backward, more=0 if self._alone else unit.elements)
        if place and place - 1 not in self._held:
            before = self._units[place - 1]
            self._fetches.append(Fetch(unit.backward, before.backward, before.elements))
            self._note(unit.backward, more=0 if self._alone else before.elements)
        for segment in range(self._segment, unit.backward + 1):
            self._note(segment)
        self._segment = unit.backward + 1
        self._sum -= self._held.pop(place)
