# mypy: disable-error-code="import-untyped, import-not-found"
"""Lets accelerate halve the batch until it fits."""

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

arguments = TrainingArguments(
    output_dir="found-batch",
    auto_find_batch_size=True,
    per_device_train_batch_size=64,
    max_steps=2,
    report_to="none",
)
trainer = Trainer(model=model, args=arguments, train_dataset=texts, data_collator=collate)
trainer.train()
print("trained with a batch of", trainer._train_batch_size)
