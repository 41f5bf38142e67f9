"""Predicts memory, speed and the time of a tune by rung, without any measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate, Engine, Rung
from ladder.search.auto import auto
from ladder.search.belief import LIKELY, SLIM, Belief, Outlook, believe
from ladder.search.cost import COMPARISONS
from ladder.search.memory import predict_memory
from ladder.search.rehearsal import Price, price
from ladder.search.space import Space

SURE = 0.99
"""A rung at least this likely to fit is predicted to fit. Chosen: the quantile of `MemoryPrediction.upper`."""
MOST_GPUS = 1024
"""The most GPUs that are considered. Chosen: more than one DeepSpeed job usually has."""


@dataclass(frozen=True, kw_only=True)
class RungPlan:
    """One rung: its expected best candidate, and the fewest GPUs on which it fits."""

    rung: Rung
    outlook: Outlook
    """Of the fastest candidate that is likely to fit, or else of the one that needs least memory."""
    fits: str
    """yes, perhaps or no."""
    smallest: int | None
    """The fewest GPUs on which the candidate that needs least memory fits; None if 1,024 are too few."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All rungs, and how long a tune would take."""

    rungs: tuple[RungPlan, ...]
    tune: Price | None
    """Of a tune with the default strategy; None if nothing is predicted to fit."""


def plan(space: Space, gpus_per_node: int | None = None) -> Plan:
    """The plan for `space`. With `gpus_per_node`, host memory grows with the nodes; None: all GPUs share it."""
    belief = believe(space, ())
    rows = [_rung_plan(engine, space, belief, gpus_per_node) for engine in space.engines]
    may_fit = any(row.fits != "no" for row in rows)
    return Plan(rungs=tuple(rows), tune=price(space, auto, comparisons=COMPARISONS) if may_fit else None)


def _rung_plan(engine: Engine, space: Space, belief: Belief, gpus_per_node: int | None) -> RungPlan:
    outlooks = [belief.outlook(candidate) for candidate in space.of_engine(engine)]
    sure, likely = ([each for each in outlooks if each.fits >= least] for least in (SURE, LIKELY))
    frugal = min(outlooks, key=lambda outlook: outlook.memory.peak)
    best = max(sure or likely or [frugal], key=lambda outlook: outlook.speed.tokens_per_second)
    top = max(outlook.fits for outlook in outlooks)
    # With offloaded activations a host may be too small for as many GPUs as fit without offloading.
    either = {frugal.candidate, replace(frugal.candidate, offload_activations=False)}
    enough = [number for each in either if (number := smallest_world(space, each, gpus_per_node)) is not None]
    return RungPlan(
        rung=engine.rung,
        outlook=best,
        fits="yes" if sure else "perhaps" if top > SLIM else "no",
        smallest=min(enough, default=None),
    )


def smallest_world(space: Space, candidate: Candidate, gpus_per_node: int | None = None) -> int | None:
    """The fewest GPUs on which `candidate` fits with a probability of 99 %; None if 1,024 are too few."""
    host_of_node = space.host_memory / num_nodes(space.world_size, gpus_per_node)
    rung = candidate.engine.rung
    backend = backend_of(rung)

    def fits(world_size: int) -> bool:
        if backend.place_obstacle(rung, "cuda", world_size):
            return False
        memory = predict_memory(space.workload, candidate, world_size=world_size, device="cuda")
        return memory.upper <= space.memory_limit and memory.host <= host_of_node * num_nodes(world_size, gpus_per_node)

    powers = [1 << exponent for exponent in range(MOST_GPUS.bit_length())]
    enough = next((world_size for world_size in powers if fits(world_size)), None)
    if enough is None:
        return None
    return next(world_size for world_size in range(enough // 2 + 1, enough + 1) if fits(world_size))


def num_nodes(world_size: int, gpus_per_node: int | None) -> int:
    """The number of nodes; one if the number of GPUs per node is unknown."""
    return 1 if gpus_per_node is None else -(-world_size // gpus_per_node)
