"""Train a small model without a word of DeepSpeed or ladder: ladder tunes this script as it is.

    ladder tune -- own_script.py --lr 1e-3
    ladder run best_config.json

Without ladder: python own_script.py --lr 1e-3
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", default="trained")
options = parser.parse_args()

# Stands for a tokenised data set: counting, from any start, as far as a few tokens or as 256.
chance = random.Random(0)
lengths = [min(256, int(chance.lognormvariate(4, 0.8)) + 8) for _ in range(400)]
data = [{"input_ids": torch.arange(chance.randrange(512), 1000)[:length] % 512} for length in lengths]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A batch, padded to its longest sample."""
    rows = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
    }


# Yours has AutoModelForCausalLM.from_pretrained(…) here.
shape = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(shape)

arguments = TrainingArguments(
    output_dir=options.output,
    learning_rate=options.lr,
    max_steps=options.steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=10,
    save_steps=10,
    logging_steps=5,
    report_to="none",
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=data[:360], eval_dataset=data[360:])
trainer.train()
print("Loss on held-out samples:", round(trainer.evaluate()["eval_loss"], 2))
