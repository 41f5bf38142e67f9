"""The rank's half of the made-up backend: DDP and autocast by torch alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ladder.events.protocol import TrialSpec
from ladder.trial.backends import RankBackend
from ladder.trial.model import make_optimizer


class MagicTraining:
    skipped_steps = 0

    def __init__(self, model: PreTrainedModel, spec: TrialSpec) -> None:
        print("the made-up backend was here", flush=True)
        self._model, self._device = DistributedDataParallel(model), spec.device
        self._optimizer = make_optimizer(spec, model)
        self._accumulation = spec.deepspeed["gradient_accumulation_steps"]
        self._clipping = spec.deepspeed["gradient_clipping"]
        self._is_boundary = True

    def begin(self, *, is_boundary: bool) -> None:
        self._is_boundary = is_boundary

    def __call__(self, **batch: Any) -> Any:
        with torch.autocast(self._device, torch.bfloat16):
            return self._model(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulation).backward()

    def step(self) -> None:
        if not self._is_boundary:
            return
        if self._clipping:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def eval(self) -> None:
        self._model.eval()

    def train(self) -> None:
        self._model.train()  # type: ignore[no-untyped-call]

    def gather(self, save_folder: str | None) -> None:
        if save_folder is not None and dist.get_rank() == 0:
            self._model.module.save_pretrained(save_folder)


class Magic(RankBackend):
    def weights_type(self, spec: TrialSpec) -> torch.dtype:
        return torch.float32

    def start(self, model: PreTrainedModel, spec: TrialSpec) -> MagicTraining:
        return MagicTraining(model, spec)


BACKEND = Magic()
