"""DeepSpeed's answer first; then, over all rungs, whether training without DeepSpeed is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ladder.search.decisions import Strategy
from ladder.search.policy import answer
from ladder.search.space import Space, of_main_backend
from ladder.tuning.tuner import Tuner, TuneResult

MakeTuner = Callable[[Space, float, int | None], Tuner]
"""A tuner of a space, with the seconds that were spent before it and its trials of knobs."""


def tune_in_turn(tuner: MakeTuner, space: Space, strategy: Strategy, *, knob_trials: int | None) -> TuneResult:
    """The result over all of `space`; its answer is DeepSpeed's where DeepSpeed has one.

    The first search is the same as without the other rungs, but for trials of those while it waits for an operator. The
    second begins with what was measured, so that only what may be faster than DeepSpeed's best gets a trial.
    """
    own = of_main_backend(space)
    if not own.engines or own.engines == space.engines:
        return tuner(space, 0.0, knob_trials).tune(strategy)
    first = tuner(own, 0.0, knob_trials).tune(strategy)
    if first.cancelled:
        return first
    whole = tuner(space, first.seconds, 0).tune(strategy)
    return replace(whole, answer=answer(whole.records), first=first.first or whole.first)
