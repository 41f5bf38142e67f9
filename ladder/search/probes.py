"""A cheap look at an engine before its trial is paid for: the same candidate with a few of the model's layers.

What starts slowly with all layers starts fast with four, and its steps are short. What is learnt of the engine's speed
holds for the whole model but for what `speed` says of depth; a full trial decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from ladder.outcome import Record
from ladder.search.belief import QUANTILE_90, Belief, Outlook
from ladder.search.cost import expected_seconds
from ladder.search.space import measured, probed

_WORTH = 0.9
"""Of the trial's seconds: a probe that is expected to save less is not worth a trial more."""
_NORMAL = NormalDist()


def probe_first(
    belief: Belief, records: Sequence[Record], outlooks: Sequence[Outlook], seconds: float, target: float
) -> tuple[Outlook, ...]:
    """The probe that should come before a trial of `outlooks`, all of one engine; empty where it would not save time.

    `seconds` are the trial's; `target` is the speed, in tokens/s, above which the engine would be the answer. It saves
    the trial if the engine then turns out to be too slow, and costs its own seconds if not.
    """
    space, engine = belief.space, outlooks[0].candidate.engine
    known = {space.by_key[key].engine for key in (*measured(records), *probed(records)) if key in space.by_key}
    if not space.probe_layers or engine in known:
        return ()
    shallow = tuple(belief.outlook(each.candidate, shallow=True) for each in outlooks)
    still = max(_still_possible(*pair, target) for pair in zip(outlooks, shallow, strict=True))
    return shallow if expected_seconds(shallow) + still * seconds < _WORTH * seconds else ()


def _still_possible(outlook: Outlook, shallow: Outlook, target: float) -> float:
    """The probability that `outlook` may still be faster than `target`, to be believed with 10 %, after the probe."""
    _, left = outlook.ahead_of(shallow)
    learnt = math.sqrt(max(1e-9, outlook.deviation**2 - left**2))
    mean = math.log(outlook.speed.tokens_per_second / target)
    return _NORMAL.cdf((mean + QUANTILE_90 * left) / learnt)
