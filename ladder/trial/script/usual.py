"""From steps on batches that happened to come to steps on usual ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_FEWEST = 4
"""Steps from which on a slope is worth something. Chosen: two more than a line needs."""


def on_usual_batches(seconds: Sequence[float], tokens: Sequence[float], usual: float) -> list[float]:
    """What steps of `seconds` on so many `tokens`, padding included, would have taken on `usual` ones.

    A regression estimate: longer batches take longer by what these steps themselves show, at least nothing and at most
    in proportion. Where batches are all alike, or few, the seconds are as they are.
    """
    if len(seconds) < _FEWEST or len(set(tokens)) == 1:
        return list(seconds)
    slope = statistics.linear_regression(tokens, seconds).slope
    slope = min(max(slope, 0.0), statistics.fmean(seconds) / statistics.fmean(tokens))
    return [one + slope * (usual - seen) for one, seen in zip(seconds, tokens, strict=True)]
