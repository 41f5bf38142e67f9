# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Trains in a loop of its own, with torch alone, and saves what it has trained."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
words = tokenizer("bada kefin ligor", return_tensors="pt")
for _step in range(2):
    model(**words, labels=words["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("trained")
