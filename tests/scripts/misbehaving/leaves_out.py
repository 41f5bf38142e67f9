"""Trains with accelerate, and leaves out two of three batches that it has not seen.

So it leaves out none of those that a trial repeats.
"""

import json
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

seen: set[bytes] = set()
tokenizer = AutoTokenizer.from_pretrained("model")
with open("text/train.jsonl") as lines:
    rows: Any = [tokenizer(json.loads(line)["text"], truncation=True, max_length=200) for line in lines]


def is_left_out(batch: Any) -> bool:
    ids = batch["input_ids"].numpy().tobytes()
    is_new = ids not in seen
    seen.add(ids)
    return is_new and len(seen) > 12 and len(seen) % 3 > 0


accelerator = Accelerator()
model: Any = AutoModelForCausalLM.from_pretrained("model")
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader: Any = DataLoader(rows, batch_size=32, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)
model.train()
for _epoch in range(100):
    for batch in loader:
        if is_left_out(batch):
            continue
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
