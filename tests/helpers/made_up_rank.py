"""The rank's halves of what is made up: each says in the rank's own log that it was here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec
from ladder.trial.backends.plain import Plain, PlainTraining
from ladder.trial.optimizers import RankOptimizer
from ladder.trial.techniques import RankTechnique


class MadeUp(RankTechnique):
    def own_batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        print("the made-up technique was here", flush=True)
        return batch


class Magic(Plain):
    def start(self, model: PreTrainedModel, spec: TrialSpec) -> PlainTraining:
        print("the made-up backend was here", flush=True)
        return super().start(model, spec)


class Spell(RankOptimizer):
    rate_of_comparison = 1e-3

    def make(self, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
        print("the made-up optimizer was here", flush=True)
        return torch.optim.Adagrad(groups, lr=rate)


TECHNIQUE, BACKEND, OPTIMIZER = MadeUp(), Magic(), Spell()
