"""A cheap look at an engine before its trial is paid for: the same candidate with a few of the model's layers.

What starts slowly with all layers starts fast with four, and its steps are short. What is learnt of the engine's speed
holds for the whole model but for what `speed` says of depth; a full trial decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Record
from ladder.search.belief import QUANTILE_90, Belief, Outlook
from ladder.search.cost import expected_seconds
from ladder.search.space import measured, probed

_WORTH = 0.9
"""Of the trial's seconds: a probe that is expected to save less is not worth a trial more. Chosen: expected seconds are
a guess, and a smaller saving may be none."""


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
    still = max(each.still_possible(target, probe, QUANTILE_90) for each, probe in zip(outlooks, shallow, strict=True))
    return shallow if expected_seconds(shallow) + still * seconds < _WORTH * seconds else ()
