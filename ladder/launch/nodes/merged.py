"""One trial out of what each of its nodes saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.events.protocol import Event, MeasuredEvent, TrialSpec
from ladder.events.trial_run import DeviceUse, Ending, TrialRun
from ladder.launch.nvml import mean


def merged(
    spec: TrialSpec, parts: Sequence[TrialRun], names: Sequence[str], events: list[list[Event]], stop: Ending | None
) -> TrialRun:
    """The whole trial. `parts` are the nodes', called `names`; `stop` is why the controller ended it, if it did.

    Times are on the controller's clock. It started when the last node's ranks existed. The caller knows when it was
    requested, and when it ended.
    """
    used = list(parts[0].device_use) if parts else []  # of those that every node knows
    return TrialRun(
        spec=spec,
        events=events,
        exits={rank: status for part in parts for rank, status in part.exits.items()},
        killed=frozenset().union(*(part.killed for part in parts)),
        stop=stop or _first_stop(parts, names, events),
        oom_kills=sum(part.oom_kills for part in parts),
        started=max((part.started for part in parts), default=0.0),
        device_use={
            key: _together([part.device_use[key] for part in parts])
            for key in used
            if all(key in part.device_use for part in parts)
        },
    )


def moved(event: Event, ahead: float) -> Event:
    """`event` on a clock that is behind its own by `ahead` seconds."""
    if isinstance(event, MeasuredEvent):
        return replace(event, t=event.t - ahead, began=event.began - ahead)
    return replace(event, t=event.t - ahead)


def _first_stop(parts: Sequence[TrialRun], names: Sequence[str], events: list[list[Event]]) -> Ending | None:
    """Why a node ended its part: the machine before a hang. That it was told to end says nothing.

    If one rank hangs, those of all nodes are silent. The one that is stopped is named, or the one that reported least.
    """

    def order(stop: Ending) -> tuple[bool, bool, int]:
        return stop.kind == "hang", not stop.is_stopped, len(events[stop.rank]) if stop.rank is not None else 0

    named = [
        part.stop
        if part.stop.rank is not None
        else replace(part.stop, sentence=f"on node {name}: {part.stop.sentence}")
        for part, name in zip(parts, names, strict=True)
        if part.stop is not None and part.stop.kind != "cancelled"
    ]
    return min(named, key=order, default=None)


def _together(uses: Sequence[DeviceUse]) -> DeviceUse:
    """Of nodes with as many GPUs each: power adds up, shares and clocks are means."""
    watts = [use.watts for use in uses]
    return DeviceUse(
        utilisation=mean([use.utilisation for use in uses]),
        watts=None if None in watts else sum(each for each in watts if each is not None),
        peak_bytes=max((use.peak_bytes for use in uses if use.peak_bytes is not None), default=None),
        others=max((use.others for use in uses if use.others is not None), default=None),
    )
