# mypy: disable-error-code="import-untyped, import-not-found"
"""Goes on with the pretraining of a masked language model; a YAML or JSON file says how."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Model to go on with."})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "jsonl with a column named text."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer texts are cut, shorter ones padded."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to mask."})
    line_by_line: bool = field(default=False, metadata={"help": "Every line is a sample of its own."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad here, not in the collator."})
    held_out: float = field(default=0.05, metadata={"help": "Share of the lines for the evaluation."})


def tokenize(lines: Dataset, tokenizer: Any, data: DataArguments) -> Dataset:
    longest = min(data.max_seq_length, tokenizer.model_max_length)
    if data.line_by_line:
        options = {"padding": "max_length" if data.pad_to_max_length else False, "truncation": True}
        return lines.map(
            lambda rows: tokenizer(rows["text"], max_length=longest, return_special_tokens_mask=True, **options),
            batched=True,
            remove_columns=lines.column_names,
        )

    def pack(rows: dict[str, Any]) -> dict[str, Any]:
        found = tokenizer(rows["text"], return_special_tokens_mask=True)
        joined = {name: list(chain.from_iterable(values)) for name, values in found.items()}
        ends = range(longest, len(joined["input_ids"]) + 1, longest)
        return {name: [values[end - longest : end] for end in ends] for name, values in joined.items()}

    return lines.map(pack, batched=True, remove_columns=lines.column_names)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: masked_trainer.py CONFIG.yaml")
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    path = Path(sys.argv[1]).resolve()
    read = parser.parse_json_file if path.suffix == ".json" else parser.parse_yaml_file
    names, data, training = read(str(path))
    set_seed(training.seed)

    tokenizer = AutoTokenizer.from_pretrained(names.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(names.model_name_or_path)
    lines = load_dataset("json", data_files=data.train_file, split="train")
    parts = lines.train_test_split(test_size=data.held_out, seed=training.seed)
    train_set, eval_set = (tokenize(parts[part], tokenizer, data) for part in ("train", "test"))

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train_set if training.do_train else None,
        eval_dataset=eval_set if training.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(
            tokenizer=tokenizer,
            mlm_probability=data.mlm_probability,
            pad_to_multiple_of=8 if training.fp16 and not data.pad_to_max_length else None,
        ),
    )
    if training.do_train:
        result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_state()
    if training.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", {**metrics, "perplexity": math.exp(metrics["eval_loss"])})


if __name__ == "__main__":
    main()
