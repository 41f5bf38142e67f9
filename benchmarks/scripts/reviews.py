"""As HPC courses teach it: a language model learns to write reviews. Trainer, 512 tokens, batches of 16."""

# mypy: disable-error-code="import-untyped, import-not-found"
import argparse
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--deepspeed")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    reviews = load_dataset("json", data_files=options.data, split="train")

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return tokenizer(rows["text"], max_length=512, truncation=True, padding="max_length")

    reviews = reviews.map(tokenize, batched=True, remove_columns=["text"])
    arguments = TrainingArguments(
        output_dir="reviews-model",
        max_steps=options.max_steps,
        per_device_train_batch_size=16,
        learning_rate=1e-6,
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        bf16=True,
        deepspeed=options.deepspeed,
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=reviews, data_collator=collator)
    trainer.train()


if __name__ == "__main__":
    main()
