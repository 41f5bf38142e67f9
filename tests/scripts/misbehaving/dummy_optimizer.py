"""Leaves its optimizer to a DeepSpeed file that is not there, as accelerate's DummyOptim does."""

import json
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DummyOptim
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

tokenizer = AutoTokenizer.from_pretrained("model")
with open("text/train.jsonl") as lines:
    rows: Any = [tokenizer(json.loads(line)["text"]) for line in lines]
loader: Any = DataLoader(rows, batch_size=4, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
model = AutoModelForCausalLM.from_pretrained("model")
Accelerator(cpu=True).prepare(model, DummyOptim(model.parameters()), loader)
