# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, no-untyped-call"
"""Tokenises its texts with datasets, and notes each time in the file that TOKENISED names."""

import os
import sys

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("model")


def tokenise(rows):
    with open(os.environ["TOKENISED"], "a") as notes:
        notes.write(f"{len(rows['text'])} texts\n")
    return tokenizer(rows["text"], truncation=True, max_length=64)


texts = load_dataset("json", data_files=sys.argv[1], split="train")
words = texts.map(tokenise, batched=True, remove_columns=["text"])
Trainer(
    model=AutoModelForCausalLM.from_pretrained("model"),
    args=TrainingArguments(output_dir="tokenised-out", per_device_train_batch_size=4, max_steps=2, report_to="none"),
    train_dataset=words,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
).train()
