"""What benchmarks/untried.py changes inside the ranks: a trial server preloads this, and its ranks inherit it.

The variable LADDER_BENCHMARK_TECHNIQUE says which; a technique that has no entry here changes nothing in a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import deepspeed

from ladder.trial import rank


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


_IN_RANKS: dict[str, Callable[[], None]] = {
    "compile": compile_engines,
    "deepcompile": compile_engines,
    "activations-on-host": keep_activations_on_the_host,
}

if (technique := os.environ["LADDER_BENCHMARK_TECHNIQUE"]) in _IN_RANKS:
    _IN_RANKS[technique]()
