# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Its samples come from processes of their own; once it trains, it also starts a program in a temporary folder."""

import subprocess
import sys
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from few import model, rows
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments


class StartsPrograms(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        start_program()


def start_program() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["touch", f"{folder}/seen"], check=True)


def trainer() -> None:
    given: dict[str, Any] = {"dataloader_num_workers": 2, "report_to": "none", "use_cpu": True, "max_steps": 400}
    arguments = TrainingArguments("out", **given)
    Trainer(model(), arguments, train_dataset=rows(), callbacks=[StartsPrograms()]).train()


def loop() -> None:
    accelerator, trained, data = Accelerator(), model(), rows()
    loader: Any = DataLoader(data, batch_size=4, num_workers=2)
    trained, optimizer, loader = accelerator.prepare(trained, torch.optim.AdamW(trained.parameters()), loader)
    for _ in range(50):
        for batch in loader:
            accelerator.backward(trained(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            start_program()


globals()[sys.argv[1]]()
