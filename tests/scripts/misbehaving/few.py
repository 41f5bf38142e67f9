# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""The model in the folder `model`, texts for it, and a Trainer around them, for the scripts beside this one."""

from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("model")
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)


def model() -> Any:
    return AutoModelForCausalLM.from_pretrained("model")


def texts() -> Any:
    found = load_dataset("json", data_files="text/train.jsonl", split="train")
    return found.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns=["text"])


def trainer(arguments: TrainingArguments, kind: Any = Trainer, **given: Any) -> Any:
    """Of the model and all texts, unless `given` has others."""
    missing = {name: make() for name, make in (("model", model), ("train_dataset", texts)) if name not in given}
    return kind(args=arguments, **{"data_collator": collate, **missing, **given})
