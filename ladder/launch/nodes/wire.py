"""What controller and agents say to each other: one JSON object a line, requests on stdin and events on stdout.

Requests, and what answers them:

    {"op": "clock"}                                    →  {"event": "clock", "now": seconds}
    {"op": "watch", "addresses": […]}                  →  tells the controller's, so that its loss is noticed
    {"op": "describe", "gpus": …, …}                   →  {"event": "described", "machine": {…}, …}, or, while somebody
                                                          uses GPUs, {"event": "busy", "sentence": …}
    {"op": "release"}                                  →  gives back the GPUs that "describe" leased
    {"op": "measure", "share": {…}, "world": …, …}     →  {"event": "port", "port": …}: once the ranks exist
                                                       →  {"event": "measured", "rates": {…}, "failed": {…}}
    {"op": "see", "path": …}                           →  {"event": "seen", "content": …}: of the file, or null
    {"op": "serve", "token": …}                        →  {"event": "serving", "port": …}: for `reach`
    {"op": "reach", "addresses": […], "port": …, …}    →  {"event": "reached", "addresses": […]}
    {"op": "open", "marker": …, "job": {…}, …}         →  {"event": "opened"}
    {"op": "load", "operators": […]}                   →  {"event": "loaded"}
    {"op": "run", "spec": "…", "deadlines": {…}}       →  {"event": "port", "port": …}: once the ranks exist
                                                       →  {"event": "said", "rank": …, "what": "…"}: what a rank says
                                                       →  {"event": "ended", "run": {…}}
    {"op": "cancel"}                                   →  ends the trial that runs
    {"op": "alive"}                                    →  comes twice a second

A request that fails is answered by {"event": "failed", "sentence": "…"}. {"event": "alive"} comes twice a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ladder.events.protocol import TrialSpec
from ladder.events.trial_run import DeviceUse, Ending, TrialRun


def to_wire(run: TrialRun) -> dict[str, Any]:
    """All but its specification and events, which the controller has already."""
    return {
        "exits": list(run.exits.items()),
        "killed": sorted(run.killed),
        "stop": asdict(run.stop) if run.stop is not None else None,
        "oom_kills": run.oom_kills,
        "requested": run.requested,
        "started": run.started,
        "ended": run.ended,
        "device_use": {key: asdict(use) for key, use in run.device_use.items()},
    }


def from_wire(spec: TrialSpec, content: Mapping[str, Any], ahead: float) -> TrialRun:
    """The trial of one node without its events; `ahead` are the seconds by which the node's clock is ahead of ours."""
    stop = content["stop"]
    return TrialRun(
        spec=spec,
        events=[[] for _ in range(spec.world_size)],
        exits={int(rank): int(status) for rank, status in content["exits"]},
        killed=frozenset(content["killed"]),
        stop=Ending(**stop) if stop is not None else None,
        oom_kills=content["oom_kills"],
        requested=content["requested"] - ahead,
        started=content["started"] - ahead,
        ended=content["ended"] - ahead,
        device_use={key: DeviceUse(**use) for key, use in content["device_use"].items()},
    )
