"""What benchmarks/untried.py changes inside the ranks: a trial server preloads this, and its ranks inherit it.

The variable LADDER_BENCHMARK_TECHNIQUE says which; a technique that has no entry here changes nothing in a rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import deepspeed

from ladder.trial import model as trial_model
from ladder.trial import steps
from ladder.trial.backends import deepspeed as backend
from ladder.trial.preload import unhide


def compile_engines() -> None:
    """Every engine from now on is compiled before its first step."""
    initialize = deepspeed.initialize

    def compiled(*arguments: Any, **named: Any) -> Any:
        engine, *others = initialize(*arguments, **named)
        engine.compile()
        return engine, *others

    deepspeed.initialize = compiled


def compile_to_the_last_pass() -> None:
    """As `compile_engines`, with what DeepCompile compiles anew at the sixth optimizer step behind the warm-up."""
    compile_engines()
    warm_up = steps.Stepper.warm_up

    def longer(self: steps.Stepper, candidate: Any, num_steps: int) -> list[float]:
        return warm_up(self, candidate, num_steps + 6)

    steps.Stepper.warm_up = longer  # type: ignore[method-assign]


def keep_moments_in_torchaos_8_bits() -> None:
    """Adam's moments from now on are torchao's of 8 bits; master weights stay as they are."""

    def made(spec: Any, model: Any) -> Any:
        unhide("torchao")
        from torchao.optim import AdamW8bit

        return AdamW8bit(trial_model._parameter_groups(model.parameters()), lr=1e-5)

    backend.make_optimizer = made  # type: ignore[attr-defined]


def leave_the_optimizer_to_deepspeed() -> None:
    """Engines from now on make the optimizer that their configuration names."""
    backend.make_optimizer = lambda spec, model: None  # type: ignore[attr-defined, assignment, return-value]


_IN_RANKS: dict[str, Callable[[], None]] = {
    "compile": compile_engines,
    "deepcompile": compile_to_the_last_pass,
    "adam-8bit-torchao": keep_moments_in_torchaos_8_bits,
    "zenflow": leave_the_optimizer_to_deepspeed,
}

if (technique := os.environ["LADDER_BENCHMARK_TECHNIQUE"]) in _IN_RANKS:
    _IN_RANKS[technique]()
