# mypy: disable-error-code="import-untyped, import-not-found"
"""Asks before it trains."""

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

steps = int(input("How many steps? "))
arguments = TrainingArguments(output_dir="asked", max_steps=steps, report_to="none")
Trainer(model=model, args=arguments, train_dataset=texts, data_collator=collate).train()
