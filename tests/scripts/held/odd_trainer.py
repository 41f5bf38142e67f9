# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""A Trainer with what scripts have around it; its arguments say which of it."""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from few import model, rows
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments


class Wrapped(torch.nn.Module):
    """A module of one's own, with a model inside, that knows nothing of transformers' methods."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()
        self.head = torch.nn.Linear(64, 2)

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.inner(input_ids=input_ids).logits[:, 0])
        return {"loss": logits.float().pow(2).mean(), "logits": logits}


class Says(TrainerCallback):
    def on_train_begin(self, *_: Any, lr_scheduler: Any = None, **__: Any) -> None:
        print("its schedule is", type(getattr(lr_scheduler, "scheduler", lr_scheduler)).__name__, flush=True)


class Batches:
    """As many samples as make 128 tokens."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter([list(range(8 * number, 8 * number + 8)) for number in range(8)])


class DrawsByTokens(Trainer):
    def get_train_dataloader(self) -> Any:
        loader: Any = DataLoader(self.train_dataset, batch_sampler=Batches(), collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


own: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
own |= {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
own |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    report_to="none",
    deepspeed=own if "scheduler" in sys.argv else None,
)
if "late" in sys.argv:
    arguments.per_device_train_batch_size = 2
    arguments.gradient_accumulation_steps = 16 // (2 * arguments.world_size)
trained = Wrapped() if "wrapped" in sys.argv else model()
if "prepared" in sys.argv:
    trained = Accelerator().prepare(trained)
trainer = (DrawsByTokens if "by_tokens" in sys.argv else Trainer)(
    model=trained, args=arguments, train_dataset=rows(), eval_dataset=rows(8), callbacks=[Says()]
)
if "evaluates" in sys.argv:
    print("before:", trainer.evaluate()["eval_loss"], flush=True)
trainer.train()
