"""Operators take up to a minute to build: beside trials, and trials that need none come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ladder.events.outcome import Record
from ladder.machine.described import Machine
from ladder.search.auto import auto, hopeful_engines
from ladder.search.policy import Measure, Strategy
from ladder.search.relevance import relevant
from ladder.search.space import Space
from ladder.search.time_left import TimeLeft, within
from ladder.tuning.operators import Operators
from ladder.tuning.refusal import less_disproved


@dataclass(frozen=True, kw_only=True)
class Building:
    """The builds of a tune of `space`."""

    operators: Operators | None
    """None where trials need none, as on a simulated machine."""
    machine: Machine
    space: Space
    aside: Space
    """The space whose trials fill the time; it may be wider."""

    def foresee(self, records: Sequence[Record]) -> None:
        """Build beside the next trial what later ones may need.

        Not beside the first, in which nothing is known yet of who may win: it came out 38 % slower than its proof with
        a build beside it (measured on an H100, Llama-3.2-1B at stage 3). And not on a CPU: a rank needs all cores.
        """
        if records and self.operators is not None and self.machine.device == "cuda":
            self.operators.foresee([engine.rung for engine in hopeful_engines(self.space, records)])

    def before(
        self,
        decision: Measure,
        strategy: Strategy,
        records: Callable[[], Sequence[Record]],
        time_left: Callable[[Sequence[Record]], TimeLeft | None],
    ) -> Measure | None:
        """What can be measured while an operator is built that `decision` needs; None if it waits for nothing.

        `records` gives those of `aside`. Strategies other than the default have an order of their own, which they keep.
        """
        operators = self.operators
        if operators is None or self.machine.device != "cuda" or strategy is not auto:
            return None
        operators.foresee([decision.engine.rung])
        if operators.are_ready(decision.engine.rung):
            return None
        ready = tuple(engine for engine in self.aside.engines if operators.are_ready(engine.rung))
        if not ready:
            return None
        space = replace(self.aside, engines=ready)
        known = less_disproved(relevant(space, records()))
        left = time_left(known)
        found = auto(space, known) if left is None else within(auto, space, known, left)
        return found if isinstance(found, Measure) else None
