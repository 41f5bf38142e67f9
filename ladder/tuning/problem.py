"""What a tune searches: the workload, the micro-batches, the space, and what its history is good for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from ladder.candidates import ADAM_8BIT, BF16_STATES, RUNGS, SHARING, Rung, divisors, engines_of
from ladder.errors import EnvironmentFaultError, UsageError
from ladder.numerics import numerics_of
from ladder.search.sharing import can_share, sharing_engines
from ladder.search.space import Space
from ladder.text import shown
from ladder.workload.shapes import default_seq_len, default_task, depth_of
from ladder.workload.workload import ModelShape, Task, Workload

if TYPE_CHECKING:
    from ladder.machine.machine import Machine

_DEFAULT_BATCH = 128
_PROBE_LAYERS = 4
_PARTIAL_SINCE, _OFFLOAD_SINCE = Version("5.18"), Version("5.23")
"""Of transformers, whose Trainer then takes `every_n_layers` and `offload`."""
_SHARING_SINCE = Version("1.12")
"""Of accelerate, which then has `sp_size`."""
_DEEP = 12
"""A model with fewer layers starts nearly as fast as a probe of it."""


def workload_of(
    model: ModelShape,
    world_size: int,
    note: Callable[[str], None],
    *,
    task: Task | None,
    seq_len: int | None,
    global_batch_size: int | None,
    **settings: Any,
) -> Workload:
    """What is trained, with our defaults where None is asked for, and the workload's other `settings`.

    UsageError for sequences longer than the model takes. `note` is told of a default that is not the usual one.
    """
    seq_len = seq_len or default_seq_len(model)
    if model.max_positions is not None and seq_len > model.max_positions:
        raise UsageError(
            f"--seq-len {seq_len} is more than the {model.max_positions} positions {shown(model.name)} has."
        )
    usual = -(-_DEFAULT_BATCH // world_size) * world_size
    if global_batch_size is None and usual != _DEFAULT_BATCH:
        note(
            f"The global batch is {usual} sequences, as {_DEFAULT_BATCH} do not divide over {world_size} ranks "
            "(--global-batch-size)."
        )
    return Workload(
        model=model,
        task=task or default_task(model.model_type, model.config),
        seq_len=seq_len,
        global_batch_size=global_batch_size or usual,
        **settings,
    )


def micro_batches_of(workload: Workload, world_size: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The micro-batches to try: divisors of the sequences a rank has per step, or the `wanted` ones among them.

    Raises UsageError when the global batch does not divide over the ranks, or by a wanted micro-batch.
    """
    batch = workload.global_batch_size
    if batch % world_size:
        below, above = batch // world_size * world_size, -(-batch // world_size) * world_size
        near = f"{above}" if not below else f"{below} or {above}"
        raise UsageError(
            f"A global batch of {batch} sequences does not divide over {world_size} ranks; "
            f"use --global-batch-size {near}, or other --gpus."
        )
    possible = divisors(batch // world_size)
    for micro_batch in wanted or ():
        if micro_batch not in possible:
            raise UsageError(
                f"--micro-batch {micro_batch} does not divide the {batch // world_size} sequences each of {world_size} "
                f"ranks has per step; possible are {', '.join(map(str, possible))}."
            )
    return tuple(sorted(set(wanted))) if wanted else tuple(possible)


_WHY_NOT = {
    BF16_STATES: "no rung that is tried keeps optimizer states on the GPU",
    ADAM_8BIT: "moments in 8 bits are for GPUs, without an optimizer offload, and at stages 1 and 2 for less than 2.1 "
    "billion parameters a GPU",
    SHARING: "sequences are shared at stage 3, by two or more GPUs of one host by which heads and sequence length "
    "divide, for causal-lm with llama, mistral, qwen2 or qwen3 and attention without a window",
}


def require_effect_of_allowed(
    workload: Workload, machine: Machine, rungs: Sequence[Rung], allowed: Collection[str]
) -> None:
    """UsageError for a name among `allowed` that no engine of these rungs could have here."""
    can = {name for rung in rungs for name in numerics_of(rung, workload, machine.world_size, machine.device)}
    if machine.num_nodes == 1 and can_share(workload, machine.world_size) and any(rung.stage == 3 for rung in rungs):
        can.add(SHARING)
    for name in allowed:
        if name not in can:
            raise UsageError(f"--allow {name} has no effect here: {_WHY_NOT[name]}; leave it out.")


def make_space(
    workload: Workload,
    machine: Machine,
    rungs: Sequence[Rung],
    micro_batches: Sequence[int],
    *,
    tolerance: float = 0.02,
    audit: float = 0.0,
    liger: bool = False,
    allowed: Collection[str] = (),
    partial: bool = False,
    offload_activations: bool = False,
) -> tuple[Space, dict[Rung, str]]:
    """The space of the supported rungs among `rungs`, and the others with the reason."""
    unsupported = {rung: machine.unsupported[rung.name] for rung in rungs if rung.name in machine.unsupported}
    supported = [rung for rung in RUNGS if rung in rungs and rung not in unsupported]

    def numerics(rung: Rung) -> list[str]:
        possible = numerics_of(rung, workload, machine.world_size, machine.device)
        return [name for name in possible if name in allowed]

    space = Space(
        workload=workload,
        world_size=machine.world_size,
        device=machine.device,
        memory_limit=machine.memory_limit,
        host_memory=machine.host_memory,
        engines=tuple(
            engine for rung in supported for engine in engines_of(rung, liger=liger, numerics=numerics(rung))
        ),
        micro_batches=tuple(micro_batches),
        gpu_name=machine.gpu_name,
        num_cores=machine.num_cores,
        num_nodes=machine.num_nodes,
        nvme_path=str(machine.nvme_path.absolute()) if machine.nvme_path is not None else None,
        tolerance=tolerance,
        probe_layers=_PROBE_LAYERS if depth_of(workload.model) >= _DEEP else 0,
        audit=audit,
        partial=partial,
        offload_activations=offload_activations,
    )
    if SHARING in allowed:
        space = replace(space, engines=(*space.engines, *sharing_engines(space)))
    return space, unsupported


def knows_partial(transformers: str) -> bool:
    """Whether this version of transformers can checkpoint every second layer, in trials and in the user's training."""
    return _is_since(transformers, _PARTIAL_SINCE)


def knows_offload(transformers: str) -> bool:
    """Whether this version of transformers can keep activations on the host, likewise."""
    return _is_since(transformers, _OFFLOAD_SINCE)


def require_sharing(accelerate: str) -> None:
    """EnvironmentFaultError where this version of accelerate lets no ranks share sequences in the user's training."""
    if not _is_since(accelerate, _SHARING_SINCE):
        raise EnvironmentFaultError(
            f"--allow {SHARING} needs accelerate {_SHARING_SINCE} or later, and here is {accelerate or 'none'}."
        )


def _is_since(version: str, since: Version) -> bool:
    try:
        return Version(version) >= since
    except ValueError:  # none is installed, or one that somebody built and named
        return False


def run_fingerprint(
    workload: Workload, machine: Machine, versions: dict[str, str], simulated: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """What a history is good for: a digest, and the facts in it for the message when they differ.

    `simulated` are the laws of a machine on paper; a history made there is never mistaken for a real machine's.
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
    if machine.device == "cuda":
        facts["allocator"] = machine.allocator
    if simulated is not None:
        facts["simulated machine"] = dict(simulated)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12], facts
