# mypy: disable-error-code="import-untyped, import-not-found"
"""Fine-tunes a causal language model on text files with the Trainer."""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from dataclasses import dataclass, field
from itertools import chain

import torch.distributed as dist
import transformers
from datasets import DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Model to start from."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if it is not the model's."})
    from_scratch: bool = field(default=False, metadata={"help": "Use the model's configuration, not its weights."})
    dtype: str | None = field(default=None, metadata={"help": "Load the weights in this dtype."})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "A jsonl or txt file."})
    validation_file: str | None = field(default=None, metadata={"help": "Another, for the evaluation."})
    validation_split_percentage: int = field(default=10, metadata={"help": "Share to hold out without such a file."})
    block_size: int = field(default=64, metadata={"help": "Tokens of a training sample."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Cut the training set, to debug."})


def read_texts(data: DataArguments) -> DatasetDict:
    kind = "json" if data.train_file.endswith(("json", "jsonl")) else "text"
    if data.validation_file:
        return load_dataset(kind, data_files={"train": data.train_file, "validation": data.validation_file})
    held_out = f"{data.validation_split_percentage}%"
    parts = {"validation": f"train[:{held_out}]", "train": f"train[{held_out}:]"}
    return DatasetDict({part: load_dataset(kind, data_files=data.train_file, split=cut) for part, cut in parts.items()})


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        names, data, training = parser.parse_json_file(sys.argv[1])
    else:
        names, data, training = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stdout)])
    transformers.utils.logging.set_verbosity(training.get_process_log_level())
    logger.info(
        "rank %s on %s, fp16 %s, bf16 %s", training.process_index, training.device, training.fp16, training.bf16
    )
    set_seed(training.seed)

    tokenizer = AutoTokenizer.from_pretrained(names.tokenizer_name or names.model_name_or_path)
    if names.from_scratch:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(names.model_name_or_path))
    else:
        model = AutoModelForCausalLM.from_pretrained(names.model_name_or_path, dtype=names.dtype)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    texts = read_texts(data)
    column = "text" if "text" in texts["train"].column_names else texts["train"].column_names[0]
    block = min(data.block_size, tokenizer.model_max_length)

    def in_blocks(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        whole = {name: list(chain.from_iterable(lists)) for name, lists in rows.items()}
        end = len(whole["input_ids"]) // block * block
        cut = {name: [ids[start : start + block] for start in range(0, end, block)] for name, ids in whole.items()}
        return {**cut, "labels": [list(ids) for ids in cut["input_ids"]]}

    with training.main_process_first(desc="tokenizing"):
        ids = texts.map(
            lambda rows: tokenizer(rows[column]),
            batched=True,
            remove_columns=texts["train"].column_names,
        )
        blocks = ids.map(in_blocks, batched=True)
    train_set = blocks["train"]
    if data.max_train_samples is not None:
        train_set = train_set.select(range(min(len(train_set), data.max_train_samples)))

    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train_set,
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    result = trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", {**result.metrics, "train_samples": len(train_set)})
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 100.0))
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if training.push_to_hub:
        trainer.push_to_hub(tasks="text-generation")


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # its thread would now and then ask for Python's lock when Python has ended, and abort
        gc.collect()  # what is left of the model holds the group
        time.sleep(0.5)  # torch 2.6 would now and then wait for ever, if the thread has not let go of the last message
        dist.destroy_process_group()
