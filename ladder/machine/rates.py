"""From what ranks measured to the rates of a machine: the slowest rank counts, because the others wait for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Points = Mapping[str, list[dict[str, Any]]]
_SHARED_BY_LINKS = ("all_gather", "reduce_scatter", "all_reduce")
_MOVES = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}
"""How often a collective moves (N − 1)/N of its bytes over each link (derived: ring algorithms)."""
BETWEEN_NODES = "between_nodes_"
"""Before the name of a collective over the ranks of all nodes; without it, it is one over those of a node."""


class Found(TypedDict):
    """What one rank, one node or all of them measured."""

    rates: dict[str, list[dict[str, Any]]]
    """The points of each rate (`ladder.trial.machine_rates`)."""
    failed: dict[str, str]
    """By name, why something was not measured."""


def slowest(found: Sequence[Found]) -> Found:
    """Of each point the longest time of all; a rate that one of them lacks is left out."""
    rates = {}
    for name in found[0]["rates"]:
        each = [one["rates"][name] for one in found if name in one["rates"]]
        if len(each) == len(found):
            rates[name] = [max(points, key=lambda point: point["seconds"]) for points in zip(*each, strict=False)]
    return Found(rates=rates, failed={name: reason for one in found for name, reason in one["failed"].items()})


def rates_of(points: Points, ranks: int, nodes: int = 1) -> dict[str, float]:
    """Rates per second and rank, and seconds of launching a block, as far as `ranks` on `nodes` measured them.

    - flops: operations in matrix products, weighted by their operations;
    - device_bytes: bytes that a copy on the device reads and writes;
    - launch_seconds: of the host, for forward and backward of a small block;
    - link_bytes: bus bandwidth of collectives in a node at their largest size, the mean of all three;
    - network_bytes: the same of collectives over all ranks of several nodes;
    - pcie_bytes: one way between GPU and pinned host memory, the slower way;
    - cpu_adam_parameters: parameters that all ranks together update.
    """
    rates = {}
    if products := points.get("products"):
        rates["flops"] = sum(each["operations"] for each in products) / sum(each["seconds"] for each in products)
    if copies := points.get("copies"):
        rates["device_bytes"] = copies[0]["bytes"] / copies[0]["seconds"]
    if launches := points.get("launches"):
        rates["launch_seconds"] = launches[0]["seconds"]
    rates |= _link("link_bytes", points, "", ranks // nodes)
    if nodes > 1:
        rates |= _link("network_bytes", points, BETWEEN_NODES, ranks)
    one_way = [each["bytes"] / each["seconds"] for each in points.get("pinned", ()) if each["way"] != "both"]
    if one_way:
        rates["pcie_bytes"] = min(one_way)
    if adam := points.get("adam"):
        rates["cpu_adam_parameters"] = ranks * adam[0]["parameters"] / adam[0]["seconds"]
    return {name: rate for name, rate in rates.items() if math.isfinite(rate) and rate > 0}


def _link(rate: str, points: Points, prefix: str, ranks: int) -> dict[str, float]:
    """The bus bandwidth of the collectives with this prefix, among so many ranks."""
    buses = [_bus_bytes(name, points[prefix + name], ranks) for name in _SHARED_BY_LINKS if points.get(prefix + name)]
    return {rate: statistics.geometric_mean(buses)} if buses and ranks > 1 else {}


def _bus_bytes(name: str, points: list[dict[str, Any]], ranks: int) -> float:
    largest = max(points, key=lambda point: float(point["bytes"]))
    return float(_MOVES[name] * (ranks - 1) / ranks * largest["bytes"] / largest["seconds"])
