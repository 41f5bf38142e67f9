# mypy: disable-error-code="import-untyped, import-not-found"
"""Catches what goes wrong in training, and tries again with half of the batch."""

import gc

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
texts = load_dataset("json", data_files="text/train.jsonl", split="train")
texts = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)

batch_size = 32
while batch_size:
    arguments = TrainingArguments(
        output_dir="halved", per_device_train_batch_size=batch_size, max_steps=2, report_to="none"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=texts, data_collator=collate)
    try:
        trainer.train()
    except RuntimeError as error:
        print(f"A batch of {batch_size} failed ({error}); trying half of it")
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        batch_size //= 2
    else:
        print(f"A batch of {batch_size} works")
        break
