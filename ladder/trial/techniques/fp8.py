"""FP8 in a rank. accelerate converts the model, as the environment says that training will too."""

from __future__ import annotations

import importlib

import torch
from transformers import PreTrainedModel

from ladder.trial.preload import unhide
from ladder.trial.techniques import RankTechnique


class Fp8(RankTechnique):
    precision = "fp8"

    def prepare(self) -> None:
        unhide("torchao")
        importlib.import_module("torchao.float8")

    def change_model(self, model: PreTrainedModel) -> None:
        """RuntimeError if accelerate would convert no layer, and training would silently be in 16 bits."""
        sizes = [module.weight.shape for module in model.modules() if isinstance(module, torch.nn.Linear)]
        if not any(size[0] % 16 == size[1] % 16 == 0 for size in sizes[1:-1]):
            raise RuntimeError("no linear layer between the first and the last has sizes that are multiples of 16")


TECHNIQUE = Fp8()
