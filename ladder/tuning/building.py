"""Operators take up to a minute to build: they begin early, and trials that need none fill the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ladder.candidates import Engine
from ladder.events.outcome import Record
from ladder.machine.described import Machine
from ladder.search.auto import auto, hopeful_engines
from ladder.search.policy import Measure, Strategy
from ladder.search.relevance import relevant
from ladder.search.space import Space
from ladder.search.time_left import TimeLeft, within
from ladder.tuning.operators import Operators
from ladder.tuning.refusal import less_disproved

_SPARE_CORES = 4
"""Beside one for each rank, so that builds do not delay the first trial. Chosen: an operator has two or three files,
which are compiled side by side, and the trial server imports its packages meanwhile."""


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
        """Build beside the next trial what later ones may need; beside the first one only where cores are spare."""
        if self.operators is None or self.machine.device != "cuda":  # a CPU rank needs all cores itself
            return
        if records or self.machine.num_cores >= self.machine.world_size + _SPARE_CORES:
            self.operators.foresee([engine.rung for engine in hopeful_engines(self.space, records)])

    def before(
        self,
        decision: Measure,
        strategy: Strategy,
        records: Sequence[Record],
        time_left: Callable[[Sequence[Record]], TimeLeft | None],
    ) -> Measure | None:
        """What can be measured while an operator is built that `decision` needs; None if it waits for nothing.

        `records` are those of `aside`. Strategies other than the default have an order of their own, which they keep.
        """
        if self.operators is None or self.machine.device != "cuda" or strategy is not auto:
            return None
        self.operators.foresee([decision.engine.rung])
        ready = tuple(filter(self._is_ready, self.aside.engines))
        if not ready or self._is_ready(decision.engine):
            return None
        space = replace(self.aside, engines=ready)
        known = less_disproved(relevant(space, records))
        left = time_left(known)
        found = auto(space, known) if left is None else within(auto, space, known, left)
        return found if isinstance(found, Measure) else None

    def _is_ready(self, engine: Engine) -> bool:
        return self.operators is None or self.operators.are_ready(engine.rung)
