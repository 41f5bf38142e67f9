# mypy: disable-error-code="import-untyped, import-not-found"
"""Exercise 5: teach a small language model to write reviews. Start it in the folder that has model/ and text/."""

import os
import time
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

if torch.cuda.is_available():
    print(f"Training on {torch.cuda.device_count()} GPUs of the type {torch.cuda.get_device_name(0)}")
else:
    print("No GPU found, training on the CPU")

# The batch system has set the number of CPUs of the job.
cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))
workers = 0 if cpus == 1 else cpus
folder = os.path.join(os.environ.get("SCRATCH_OF_COURSE", "."), "reviews-model")

tokenizer = AutoTokenizer.from_pretrained("model")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("model")

reviews = load_dataset("json", data_files="text/train.jsonl", split="train").train_test_split(test_size=0.1, seed=7)


def tokenize(rows: dict[str, list[str]]) -> Any:
    return tokenizer(rows["text"], max_length=64, truncation=True)


reviews = reviews.map(tokenize, batched=True, remove_columns=["text"])

arguments = TrainingArguments(
    output_dir=folder,
    eval_strategy="steps",
    eval_steps=10,
    save_strategy="steps",
    save_steps=10,
    save_total_limit=1,
    learning_rate=2e-5,
    weight_decay=0.01,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=32,
    max_steps=20,
    logging_steps=2,
    dataloader_num_workers=workers,
    dataloader_pin_memory=torch.cuda.is_available(),
    report_to="none",
)

trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=reviews["train"],
    eval_dataset=reviews["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False, return_tensors="pt"),
)

began = time.time()
trainer.train()
print(f"Trained for {time.time() - began:.1f} seconds")
print("Loss on the test set:", trainer.evaluate()["eval_loss"])

# Keep the result apart from the checkpoints.
trainer.model.save_pretrained(os.path.join(folder, "final"))
tokenizer.save_pretrained(os.path.join(folder, "final"))
with torch.no_grad():
    start = tokenizer("bada kefin", return_tensors="pt").to(trainer.model.device)
    words = trainer.model.generate(**start, max_new_tokens=20, do_sample=True, pad_token_id=tokenizer.pad_token_id)
print("A review:", tokenizer.decode(words[0], skip_special_tokens=True))
