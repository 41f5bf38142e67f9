"""Where the ranks can share each sequence, and where they have to: Ulysses, sequence parallelism by DeepSpeed.

At stage 3 alone: below it DeepSpeed 0.19.8 makes the gradient as many times too large as there are ranks, which Adam
does not notice, but clipping does (measured: 2.403 instead of 1.201 with two ranks at stages 1 and 2, 1.201 at 3).
"""

from __future__ import annotations

from dataclasses import replace

from ladder.candidates import Candidate, Engine
from ladder.search.space import SURE, WORTH, Space
from ladder.workload.workload import Workload

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Whose attention transformers hands to Ulysses as a whole, with keys of as many heads as their configuration says."""


def can_share(workload: Workload, world_size: int) -> bool:
    """Whether `world_size` ranks can work on one sequence of `workload`, each on its part.

    Each rank has some of the heads, so their number divides by the ranks (or the ranks by that of the keys). Ulysses
    knows no mask but the causal one: a sliding window would silently be the whole sequence.
    """
    model = workload.model
    heads, keys = model.num_heads, model.num_kv_heads
    return (
        world_size > 1
        and workload.task == "causal-lm"
        and model.model_type in _FAMILIES
        and not _has_window(workload)
        and workload.seq_len % world_size == 0
        and heads % world_size == 0
        and (keys % world_size == 0 or world_size % keys == 0)
    )


def _has_window(workload: Workload) -> bool:
    """As transformers reads the configuration: Mistral's has a window where it names none, Qwen's where it says so."""
    config, kind = workload.model.config, workload.model.model_type
    is_used = config.get("use_sliding_window", not kind.startswith("qwen"))
    windowed = is_used and config.get("sliding_window", 4096 if kind != "llama" else None) is not None
    return bool(windowed or any(layer != "full_attention" for layer in config.get("layer_types") or ()))


def sharing_engines(space: Space) -> list[Engine]:
    """Of the space's engines, those of stage 3 with hardly room for one sequence: the same, with ranks that share it.

    Where a sequence fits, be it on other kernels, sharing it saves nothing that is wanted, and costs the exchange of
    heads; where not even its part fits, or what does not fit are the parameters, it is no help. Between nodes the
    exchange was never tried.
    """
    if space.num_nodes > 1 or 1 not in space.micro_batches or not can_share(space.workload, space.world_size):
        return []

    def needs(engine: Engine) -> int:
        """With one sequence at a time, all layers checkpointed."""
        sequences = space.sequences_per_rank * engine.ranks_of_a_sequence(space.world_size)
        return space.predicted_peak(Candidate(engine, 1, 1, sequences))

    limit = space.memory_limit
    alone = {engine: needs(engine) for engine in space.engines if not engine.ulysses}
    roomy = {engine.rung for engine, peak in alone.items() if peak <= SURE * limit}
    sharing = []
    for engine, peak in alone.items():
        if engine.rung in roomy or engine.rung.stage < 3 or "nvme" in engine.rung.devices:
            continue
        shared = replace(engine, ulysses=True)
        part = needs(shared)
        if part <= limit and peak - part > WORTH * limit:
            sharing.append(shared)
    return sharing
