# mypy: disable-error-code="import-untyped, import-not-found"
"""Trains a classifier of single sentences or of pairs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "jsonl with label, and sentence or sentence1 and sentence2."})
    max_seq_length: int = field(default=128, metadata={"help": "Tokens that are kept."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Otherwise the collator pads each batch."})
    max_train_samples: int | None = None


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Encoder to start from."})
    ignore_mismatched_sizes: bool = False


def score(found: EvalPrediction) -> dict[str, float]:
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    guesses, truth = np.argmax(logits, axis=1), found.label_ids
    hits = float(((guesses == 1) & (truth == 1)).sum())
    return {"accuracy": float((guesses == truth).mean()), "f1": 2 * hits / max(1.0, float((guesses + truth).sum()))}


def main() -> None:
    names, data, training = HfArgumentParser(
        (ModelArguments, DataArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training.seed)

    rows = load_dataset("json", data_files=data.train_file, split="train")
    labels = sorted(set(rows["label"]))
    ids = {str(label): number for number, label in enumerate(labels)}
    config = AutoConfig.from_pretrained(
        names.model_name_or_path,
        num_labels=len(labels),
        label2id=ids,
        id2label={number: label for label, number in ids.items()},
    )
    tokenizer = AutoTokenizer.from_pretrained(names.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        names.model_name_or_path, config=config, ignore_mismatched_sizes=names.ignore_mismatched_sizes
    )

    sentences = [name for name in ("sentence", "sentence1", "sentence2") if name in rows.column_names]
    padding = "max_length" if data.pad_to_max_length else False

    def encode(batch: dict[str, Any]) -> Any:
        texts = [batch[name] for name in sentences]
        found = tokenizer(*texts, padding=padding, max_length=data.max_seq_length, truncation=True)
        found["label"] = [ids[str(label)] for label in batch["label"]]
        return found

    with training.main_process_first(desc="encoding"):
        parts = rows.train_test_split(test_size=0.2, seed=0).map(encode, batched=True)
    train_set = parts["train"]
    if data.max_train_samples is not None:
        train_set = train_set.select(range(min(len(train_set), data.max_train_samples)))

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train_set,
        eval_dataset=parts["test"],
        compute_metrics=score,
        processing_class=tokenizer,
        data_collator=default_data_collator if data.pad_to_max_length else DataCollatorWithPadding(tokenizer),
    )
    if training.do_train:
        result = trainer.train()
        trainer.log_metrics("train", result.metrics)
        trainer.save_model()
        trainer.save_state()
    if training.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
