"""What a tune searches: the micro-batches, the problem and the space; and the fingerprint of its history."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import SLOTS, Engine, Problem, Rung, Technique, divisors, engines_having
from ladder.errors import UsageError
from ladder.search.space import Space
from ladder.text import digest_of
from ladder.workload.shapes import depth_of
from ladder.workload.workload import Workload

if TYPE_CHECKING:
    from ladder.machine.described import Machine

_PROBE_LAYERS = 4
"""Layers of a probe. Measured: with four of 32, the uncertainty of an engine's speed falls from 17 to 40 % to 7 to 12 %
(benchmarks/results/search)."""
_DEEP = 12
"""Models with at least this many layers are probed. Chosen: one with fewer starts nearly as fast as its probe."""


def micro_batches_of(workload: Workload, world_size: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The micro-batches to try: divisors of the sequences that a rank has per step, or the `wanted` ones among them.

    Where a script generates what it trains on, they also divide what a rank generates at once.

    UsageError if the number of ranks does not divide the global batch, or a wanted micro-batch does not divide a
    rank's share.
    """
    batch = workload.global_batch_size
    if batch % world_size:
        below, above = batch // world_size * world_size, -(-batch // world_size) * world_size
        near = f"{above}" if not below else f"{below} or {above}"
        raise UsageError(
            f"A global batch of {batch} sequences cannot be divided evenly over {world_size} ranks; "
            f"use --global-batch-size {near}, or change --gpus."
        )
    shared = math.gcd(batch // world_size, (workload.completions(world_size) or batch) // world_size)
    possible = divisors(shared)
    for micro_batch in wanted or ():
        if micro_batch not in possible:
            raise UsageError(
                f"--micro-batch {micro_batch} does not divide the {shared} sequences each of {world_size} "
                f"ranks has per step; possible are {', '.join(map(str, possible))}."
            )
    return tuple(sorted(set(wanted))) if wanted else tuple(possible)


def problem_of(workload: Workload, machine: Machine) -> Problem:
    """The problem for the search: what is trained, and on which machine."""
    return Problem(
        workload=workload,
        world_size=machine.world_size,
        device=machine.device,
        memory_limit=machine.memory_limit,
        is_limited=machine.is_limited,
        host_memory=machine.host_memory,
        gpu_name=machine.gpu_name,
        num_cores=machine.num_cores,
        num_nodes=machine.num_nodes,
        nvme_path=str(machine.nvme_path.absolute()) if machine.nvme_path is not None else None,
        rates=tuple(sorted(machine.rates.items())),
        learned=tuple((name, *belief) for name, belief in sorted(machine.learned.items())),
        earlier=machine.earlier,
    )


def space_on(
    workload: Workload, machine: Machine, rungs: Collection[Rung], micro_batches: Sequence[int], **settings: Any
) -> tuple[Space, dict[Rung, str]]:
    """The space of the `rungs` that work on `machine`, with `settings` of `make_space`; and why the others do not."""
    supported, unsupported = split_supported(rungs, machine, workload)
    return make_space(problem_of(workload, machine), supported, micro_batches, **settings), unsupported


def make_space(
    problem: Problem,
    rungs: Sequence[Rung],
    micro_batches: Sequence[int],
    *,
    techniques: Sequence[Technique] = (),
    checkpointing: Sequence[str] = (),
    tolerance: float = 0.02,
) -> Space:
    """The candidates of `rungs`, with and without each of `techniques`. The machine must support all of `rungs`.

    `checkpointing` names the ways of checkpointing to try besides all layers and none. A trainer that generates knows
    no other ways: TRL switches checkpointing off while it generates, and on again for all layers.
    """
    if problem.workload.completions(problem.world_size) is not None:
        checkpointing = ()
    space = Space(
        **{field.name: getattr(problem, field.name) for field in fields(Problem)},
        engines=tuple(engine for rung in rungs for engine in _engines_of(rung, problem, techniques)),
        micro_batches=tuple(micro_batches),
        tolerance=tolerance,
        probe_layers=_probe_layers(problem.workload),
        checkpointing=tuple(checkpointing),
    )
    for technique in techniques:
        more = technique.engines(space, space.engines, space.predicted_peak)
        space = replace(space, engines=(*space.engines, *(more or ())))
    return space


def _probe_layers(workload: Workload) -> int:
    """Layers of a probe; 0 for none: a shallow model starts no sooner, or the script has a model of its own."""
    return _PROBE_LAYERS if workload.script is None and depth_of(workload.model) >= _DEEP else 0


def _engines_of(rung: Rung, problem: Problem, techniques: Sequence[Technique]) -> list[Engine]:
    """The engine of `rung` without techniques, and every combination of it with at most one technique per slot."""
    engines = [Engine(rung)]
    for slot in reversed(SLOTS):
        of_slot = [each for each in techniques if each.slot == slot and each.is_tried_everywhere]
        engines += [new for engine in engines for each in of_slot for new in engines_having(each, [engine], problem)]
    return engines


def place_obstacle(rung: Rung, machine: Machine, workload: Workload) -> str:
    """Why `rung` is not tried with so many ranks as `machine` has; empty if it is."""
    has_script = workload.script is not None
    return backend_of(rung).place_obstacle(rung, machine.device, machine.world_size, own_script=has_script)


def split_supported(
    rungs: Collection[Rung], machine: Machine, workload: Workload
) -> tuple[list[Rung], dict[Rung, str]]:
    """The `rungs` that work for `workload` on `machine`, in the documented order, and the others with the reason."""
    reasons = {
        rung: place_obstacle(rung, machine, workload)
        or machine.unsupported.get(rung.name)
        or backend_of(rung).obstacle(workload, rung)
        for rung in rungs
    }
    unsupported = {rung: reason for rung, reason in reasons.items() if reason}
    return [rung for rung in RUNGS_BY_NAME.values() if rung in rungs and rung not in unsupported], unsupported


def run_fingerprint(
    workload: Workload, machine: Machine, versions: dict[str, str], simulated: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """The fingerprint of a history: a digest, and the facts in it for the message if they differ.

    `simulated` is the description of a machine on paper, so that its history is never used for a real machine.
    """
    facts = {
        "model": workload.model.name,
        "workload": workload.fingerprint(),
        "device": machine.device,
        "GPU": machine.gpu_name,
        "world size": machine.world_size,
        "threads of a rank": machine.host_threads,
        "memory limit": machine.memory_limit,
        "versions": {name: versions[name] for name in sorted(versions) if name != "python"},
    }
    if machine.num_nodes > 1:
        facts["nodes"] = machine.num_nodes
    if machine.device == "cuda":
        facts["allocator"] = machine.allocator
    if simulated is not None:
        facts["simulated machine"] = dict(simulated)
    return digest_of(facts, 12), facts
