"""From the steps that a proof happened to make to the steps of a whole training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FEWEST = 4
"""Steps from which on a slope is worth something. Chosen: two more than a line needs."""

_FIRST_SECONDS = 45.0
"""Steps in which a kernel is compiled or memory reserved do not count, as a training does that once. But they do if
they take longer than this: then it goes on as long as the training. Chosen: in the first 20 steps of TRL's SFT, four
took 1.0 to 2.4 s longer than the others (measured on two H100)."""
_LONG_SECONDS = 10.0
"""Steps as long as this count in any case: what happens once is a small part of them, and more of them would cost much.
Chosen, from the same figures."""
_STALL = 1.5
"""A window that takes this many times the median, and not because its batches are longer or late, has a stall: the host
is busy, or kernels are made ready for a new shape. Chosen: such steps of TRL's SFT took 2.0 to 2.4 s in place of 0.47,
four times in the first 16 and never in the next 100 (measured on an H100)."""
_CALM_SECONDS = 10.0
"""Stalls are over if none came for so long. Chosen: twenty steps of that training."""
_PATIENCE = 4.0
"""Stalls that are not over after so many times the seconds of a proof's steps go on as long as the training. Chosen:
40 s, about as `_FIRST_SECONDS`."""


@dataclass(frozen=True)
class Window:
    """Some optimizer steps; all else is of one of them: of the slowest rank, and tokens of all."""

    steps: int
    seconds: float
    wait: float
    """Seconds of the rank that waited longest for its loader."""
    tokens: float
    padded: float
    """Tokens with their padding."""
    has_firsts: bool
    """A rank did meanwhile what a training does once (`FirstTimes`)."""

    @property
    def busy(self) -> float:
        """Seconds in which no rank waits for its loader."""
        return self.seconds - self.wait

    @property
    def pace(self) -> float:
        """The same of a token, padding included."""
        return self.busy / max(1.0, self.padded)

    @property
    def whole_seconds(self) -> float:
        """Of all its steps."""
        return self.steps * self.seconds


def that_count(windows: Sequence[Window], are_alike: bool = True) -> list[Window]:
    """Those whose speed is the training's: without those with what a training does once, unless that never ends.

    Only windows that `are_alike` but for the length of their batches show stalls: one that takes long to generate may
    look like one, and is part of the training.
    """
    if sum(window.whole_seconds for window in windows if window.has_firsts) > _FIRST_SECONDS:
        return list(windows)
    seen = [window for window in windows if not window.has_firsts or window.whole_seconds >= _LONG_SECONDS]
    calm = _after_stalls(seen) if are_alike else seen
    return calm if _last_long_enough(calm) else seen


def may_be_calm_soon(windows: Sequence[Window], seconds: float) -> bool:
    """Whether there were stalls, and more steps than a proof's usual `seconds` would show whether they are over."""
    calm = _after_stalls(windows)
    if len(calm) == len(windows) or _last_long_enough(calm):
        return False
    return sum(window.whole_seconds for window in windows) < _PATIENCE * seconds


def _after_stalls(windows: Sequence[Window]) -> list[Window]:
    if not windows:
        return []
    usual = statistics.median(window.busy for window in windows)
    pace = statistics.median(window.pace for window in windows)
    stalls = [window.busy > _STALL * usual and window.pace > _STALL * pace for window in windows]
    last = max((number for number, stalled in enumerate(stalls, start=1) if stalled), default=0)
    return list(windows[last:])


def _last_long_enough(windows: Sequence[Window]) -> bool:
    return sum(window.whole_seconds for window in windows) >= _CALM_SECONDS


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
