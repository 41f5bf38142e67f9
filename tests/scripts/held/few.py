# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""A tiny model, its data, and a loop with accelerate around them, for the scripts beside this one."""

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def rows(count: int = 64) -> list[Any]:
    ids = torch.randint(SIZES["vocab_size"], (count, 16))
    return [{"input_ids": row, "labels": row} for row in ids]


def model() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


class Training:
    """What `Accelerator.prepare` makes of it."""

    def __init__(self, count: int = 64, micro_batch: int = 4, **options: Any) -> None:
        made, data = model(), rows(count)
        loader: Any = DataLoader(data, batch_size=micro_batch, shuffle=True)  # type: ignore[arg-type]
        self.accelerator: Any = Accelerator(**options)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)
        schedule = get_linear_schedule_with_warmup(optimizer, 3, 30)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            made, optimizer, loader, schedule
        )

    def step(self, batch: Any) -> None:
        self.accelerator.backward(self.model(**batch).loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def write(name: str) -> None:
    """A file that no trial may write."""
    with open(name, "w") as file:
        file.write("from here on this is the training's own affair")
