"""Probes: a short trial of an engine with a few of the model's layers, before a full trial.

With four layers an engine starts fast and its steps are short. The engine's speed on the whole model follows from it,
with an uncertainty for depth (`speed`); a full trial decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ladder.events.outcome import Record
from ladder.search.belief import QUANTILE_90, Belief, Outlook
from ladder.search.cost import expected_seconds
from ladder.search.space import measured, probed

_WORTH = 0.9
"""With a probe, the expected seconds must be less than this fraction of the trial's. Chosen: expected seconds are
uncertain, so a smaller saving may be none."""


def probe_first(
    belief: Belief, records: Sequence[Record], outlooks: Sequence[Outlook], seconds: float, target: float
) -> tuple[Outlook, ...]:
    """The probe to run before a trial of `outlooks`, all of one engine; empty if it would not save time.

    `seconds` are the trial's; `target` is the speed, in tokens/s, above which the engine would be the answer. A probe
    saves the trial if the engine turns out to be too slow, and otherwise costs its own time.
    """
    space, engine = belief.space, outlooks[0].candidate.engine
    known = {space.by_key[key].engine for key in (*measured(records), *probed(records)) if key in space.by_key}
    if not space.probe_layers or engine in known:
        return ()
    shallow = tuple(belief.outlook(each.candidate, shallow=True) for each in outlooks)
    still = max(each.still_possible(target, probe, QUANTILE_90) for each, probe in zip(outlooks, shallow, strict=True))
    return shallow if expected_seconds(shallow) + still * seconds < _WORTH * seconds else ()
