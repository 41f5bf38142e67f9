"""What somebody does who looks for a micro-batch by hand, in several searches that share the time.

A search tries sizes that double, and ends itself when one fails or is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agreed import BUDGET
from side_by_side import TIME_OVER

_SHORTEST = 45.0
"""Seconds that a search must still have. Chosen: the ranks of a large model take 20 to 40 to start."""

Search = TypeVar("Search")
Row = dict[str, Any]
"""Of one size, with its `tokens_per_second`; or how a search `ended`, where that was not by itself."""


@dataclass
class Searched:
    """What all searches found."""

    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = True
    """No search was cut off."""

    @property
    def best(self) -> Row | None:
        """The fastest row; None if nothing fits."""
        fits = [row for row in self.rows if "tokens_per_second" in row]
        return max(fits, key=lambda row: float(row["tokens_per_second"]), default=None)

    def told(self) -> dict[str, Any]:
        """What a way tells of them; whoever is out of time has not failed."""
        ended = [row["ended"] for row in self.rows if "ended" in row]
        failed = [why for why in ended if not why.startswith(TIME_OVER)]
        told = {"seconds": self.seconds, "failures": len(failed), "failed": sorted(set(failed))}
        why = {} if self.best is not None else {"why": "; ".join(sorted(set(ended)))}
        return told | {"finished": self.finished} | why


def searched(
    searches: Sequence[Search],
    micro_batches: Sequence[int],
    attempt: Callable[[Search, list[int], float], tuple[list[Row], float]],
) -> Searched:
    """All searches, within BUDGET.

    `attempt` gets a search, the sizes that it has left and its seconds, and returns its rows and the seconds that it
    took. Each search gets an equal part of the time that is left; those that are cut off go on with what the others
    leave.
    """
    found = Searched()
    left = {search: list(micro_batches) for search in searches}
    while left and BUDGET - found.seconds >= _SHORTEST:
        for number, search in enumerate(waiting := list(left)):
            longest = (BUDGET - found.seconds) / (len(waiting) - number)
            rows, seconds = attempt(search, left[search], longest)
            found.rows += rows
            found.seconds += seconds
            fitting = [row["micro_batch"] for row in rows if "tokens_per_second" in row]
            left[search] = [size for size in left[search] if size > max(fitting, default=0)]
            if not left[search] or not rows[-1].get("ended", "").startswith(TIME_OVER):
                del left[search]
    found.finished = not left
    return found
