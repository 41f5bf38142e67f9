"""Trains with accelerate and computes its own loss. Of an error there it makes little, as its first argument says.

With `skip` it leaves the batch out. Its other argument says how many times as large as they have to be its logits are,
which takes memory. With `choose` it leaves out two of three batches that it has not seen, so none of those that a trial
repeats.
"""

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

way, times = sys.argv[1], int(sys.argv[2])
seen: set[bytes] = set()
tokenizer = AutoTokenizer.from_pretrained("model")
with open("text/train.jsonl") as lines:
    rows: Any = [tokenizer(json.loads(line)["text"], truncation=True, max_length=200) for line in lines]


def loss_of(model: Any, batch: Any) -> Any:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    large = logits.float().repeat(1, 1, times)
    return torch.nn.functional.cross_entropy(large[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def is_left_out(batch: Any) -> bool:
    ids = batch["input_ids"].numpy().tobytes()
    is_new = ids not in seen
    seen.add(ids)
    return is_new and len(seen) > 12 and len(seen) % 3 > 0


def train(batch_size: int) -> None:
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained("model")
    loader: Any = DataLoader(
        rows, batch_size, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False)
    )
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)
    model.train()
    for _epoch in range(100):
        for batch in loader:
            if way == "choose" and is_left_out(batch):
                continue
            try:
                loss = loss_of(model, batch)
            except RuntimeError as error:
                print("caught:", error, flush=True)
                continue
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


train(32)
