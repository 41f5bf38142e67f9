# mypy: disable-error-code="import-untyped, import-not-found"
"""Calls train(), but has no step to train: no epoch is asked for or, with --empty, no sample is left."""

import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--empty", action="store_true", help="train on a data set without samples")
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
texts = load_dataset("json", data_files="text/train.jsonl", split="train")
texts = texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
if options.empty:
    texts = texts.filter(lambda row: len(row["input_ids"]) > 1000)

arguments = TrainingArguments(output_dir="zero", num_train_epochs=1 if options.empty else 0, report_to="none")
trainer = Trainer(model=model, args=arguments, train_dataset=texts, data_collator=collate)
print(trainer.train())
