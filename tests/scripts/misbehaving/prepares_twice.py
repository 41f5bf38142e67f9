# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Trains with accelerate, whose Accelerator prepares the model before all else, and saves its state."""

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

tokenizer = AutoTokenizer.from_pretrained("model")
accelerator = Accelerator()
model = accelerator.prepare(AutoModelForCausalLM.from_pretrained("model"))
texts: Any = [tokenizer("bada kefin ligor")] * 8
loader: Any = DataLoader(texts, batch_size=2, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4), loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state("trained")
