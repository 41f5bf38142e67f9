"""What benchmarks/untried.py changes inside the ranks: a trial server preloads this, and its ranks inherit it.

The variable LADDER_BENCHMARK_TECHNIQUE says which; a technique that has no entry here changes nothing in a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ladder.trial import model as trial_model
from ladder.trial import rank, steps
from ladder.trial.preload import unhide


def compile_engines() -> None:
    """Every engine from now on is compiled before its first step."""
    initialize = deepspeed.initialize

    def compiled(*arguments: Any, **named: Any) -> Any:
        engine, *others = initialize(*arguments, **named)
        engine.compile()
        return engine, *others

    deepspeed.initialize = compiled


def keep_activations_on_the_host() -> None:
    """Checkpointing from now on saves each layer's input in pinned host memory."""

    def set_checkpointing(model: Any, every: int) -> None:
        partial = {"every_n_layers": every} if every > 1 else {}
        model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True, **partial)

    rank.set_checkpointing = set_checkpointing  # type: ignore[assignment]


def share_sequences() -> None:
    """All ranks work on the same sequences from now on, each on its part of them (Ulysses)."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    initialize, build_model, make_batch, batches = deepspeed.initialize, rank.build_model, steps.make_batch, count()
    groups: list[Any] = []

    def built(spec: Any) -> Any:
        model = build_model(spec)
        size, implementation = spec.candidates[0].micro_batch, model.config._attn_implementation
        groups.append(
            UlyssesSPAttentionHF.register_with_transformers(
                model, implementation, spec.world_size, micro_batch_size=size
            )
        )
        return model

    def initialized(*, config: dict[str, Any], **named: Any) -> Any:
        # Of sequences there are fewer to a step than its batch says: as many as one rank has.
        own = {key: value for key, value in config.items() if key != "train_batch_size"}
        return initialize(config=own, mpu=groups[-1], **named)

    def part(spec: Any, vocab_size: int, micro_batch: int, _: torch.Generator) -> dict[str, torch.Tensor]:
        same_everywhere = torch.Generator().manual_seed(next(batches))
        ids = make_batch(spec, vocab_size, micro_batch, same_everywhere)["input_ids"]
        following = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        own = [
            each.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()
            for each in (ids, following, positions)
        ]
        return {"input_ids": own[0], "labels": own[1], "shift_labels": own[1], "position_ids": own[2]}

    rank.build_model = built
    deepspeed.initialize = initialized
    steps.make_batch = part


def keep_moments_in_torchaos_8_bits() -> None:
    """Adam's moments from now on are torchao's of 8 bits; master weights stay as they are."""

    def made(spec: Any, model: Any) -> Any:
        unhide("torchao")
        from torchao.optim import AdamW8bit

        return AdamW8bit(trial_model._parameter_groups(model.parameters()), lr=1e-5)

    rank.make_optimizer = made


def leave_the_optimizer_to_deepspeed() -> None:
    """Engines from now on make the optimizer that their configuration names."""
    rank.make_optimizer = lambda spec, model: None  # type: ignore[assignment, return-value]


_IN_RANKS: dict[str, Callable[[], None]] = {
    "compile": compile_engines,
    "deepcompile": compile_engines,
    "activations-on-host": keep_activations_on_the_host,
    "ulysses": share_sequences,
    "adam-8bit-torchao": keep_moments_in_torchaos_8_bits,
    "zenflow": leave_the_optimizer_to_deepspeed,
}

if (technique := os.environ["LADDER_BENCHMARK_TECHNIQUE"]) in _IN_RANKS:
    _IN_RANKS[technique]()
