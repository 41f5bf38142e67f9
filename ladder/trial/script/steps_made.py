"""How far a training has come, whoever drives it: micro-steps and optimizer steps of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ladder.trial.wrapping import wrap


class StepsMade:
    """Counts micro-steps at `backward` and optimizer steps at `step`, from `listen` on.

    All of them pass there: loss.backward(), accelerate's and DeepSpeed's engine. A backward pass inside another one, as
    checkpointing may make, is a part of it. An optimizer that steps several times after a backward pass, once for each
    of its groups, makes one step.
    """

    def __init__(self) -> None:
        self.micro_steps = self.optimizer_steps = 0
        self.accumulation = 0
        """Micro-steps of the optimizer step that had the most."""
        self.forwards = 0
        """Through an engine, of which gradients could be asked."""
        self.before_backward = list[Callable[[Any], None]]()
        """Called with what a micro-step's backward pass begins at, usually the loss."""
        self.schedule: Any = None
        """Of the learning rate, where the script gave it to its engine."""
        self.compared = set[str]()
        """What of the first training's plan was compared with the script's own."""
        self._is_passing, self._passes = False, 0

    def listen(self) -> None:
        wrap(torch.autograd, "backward", self._passed)
        register_optimizer_step_pre_hook(self._stepped)

    def _passed(self, own: Any, tensors: Any, *arguments: Any, **options: Any) -> None:
        if self._is_passing:
            own(tensors, *arguments, **options)
            return
        self.micro_steps += 1
        self._is_passing, self._passes = True, self._passes + 1
        try:
            for told in self.before_backward:
                told(tensors)
            own(tensors, *arguments, **options)
        finally:
            self._is_passing = False

    def _stepped(self, *_: Any) -> None:
        if self._passes:
            self.accumulation, self._passes = max(self.accumulation, self._passes), 0
            self.optimizer_steps += 1
