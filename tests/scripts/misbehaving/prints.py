# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Prints a gigabyte before it trains, and goes on printing."""

import sys
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

line = "x" * 1023 + "\n"
for _ in range(1024):
    sys.stdout.write(line * 1024)
sys.stdout.flush()

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
texts = load_dataset("json", data_files="text/train.jsonl", split="train")
texts = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)


class Loud(Trainer):
    def training_step(self, *arguments: Any, **options: Any) -> Any:
        print("step", "x" * 10_000)
        return super().training_step(*arguments, **options)


arguments = TrainingArguments(output_dir="printed", max_steps=2, report_to="none")
Loud(model=model, args=arguments, train_dataset=texts, data_collator=collate).train()
