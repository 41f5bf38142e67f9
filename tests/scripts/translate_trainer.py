# mypy: disable-error-code="import-untyped, import-not-found"
"""Fine-tunes an encoder-decoder model to translate, and measures it by what it generates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "Encoder-decoder model to start from."})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "jsonl with a column named translation."})
    source_lang: str = field(default="en", metadata={"help": "Its language to translate from."})
    target_lang: str = field(default="de", metadata={"help": "Its language to translate into."})
    source_prefix: str = field(default="", metadata={"help": "Put before each source text, as T5 expects it."})
    max_source_length: int = 128
    max_target_length: int = 128
    num_beams: int = 1
    ignore_pad_token_for_loss: bool = True


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
    names, data, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(names.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(names.model_name_or_path)
    if model.config.decoder_start_token_id is None:
        raise ValueError("the model does not say with which token its decoder starts")

    def encode(rows: dict[str, list[dict[str, str]]]) -> Any:
        sources = [data.source_prefix + each[data.source_lang] for each in rows["translation"]]
        targets = [each[data.target_lang] for each in rows["translation"]]
        found = tokenizer(sources, max_length=data.max_source_length, truncation=True)
        found["labels"] = tokenizer(text_target=targets, max_length=data.max_target_length, truncation=True)[
            "input_ids"
        ]
        return found

    pairs = load_dataset("json", data_files=data.train_file, split="train").train_test_split(test_size=0.1, seed=0)
    with training.main_process_first(desc="encoding"):
        pairs = pairs.map(encode, batched=True, remove_columns=["translation"])

    def overlap(found: Any) -> dict[str, float]:
        """Of the words of the translation, how many were generated."""
        guesses, truth = (np.where(ids < 0, tokenizer.pad_token_id, ids) for ids in found)
        guessed = [set(text.split()) for text in tokenizer.batch_decode(guesses, skip_special_tokens=True)]
        true = [set(text.split()) for text in tokenizer.batch_decode(truth, skip_special_tokens=True)]
        shares = [len(left & right) / max(1, len(right)) for left, right in zip(guessed, true, strict=True)]
        lengths = [int((ids != tokenizer.pad_token_id).sum()) for ids in guesses]
        return {"overlap": float(np.mean(shares)), "gen_len": float(np.mean(lengths))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training,
        train_dataset=pairs["train"] if training.do_train else None,
        eval_dataset=pairs["test"] if training.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(
            tokenizer,
            model=model,
            label_pad_token_id=-100 if data.ignore_pad_token_for_loss else tokenizer.pad_token_id,
            pad_to_multiple_of=8 if training.fp16 else None,
        ),
        compute_metrics=overlap if training.predict_with_generate else None,
    )
    if training.do_train:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        trainer.save_model()
    if training.do_eval:
        metrics = trainer.evaluate(
            max_length=data.max_target_length, num_beams=data.num_beams, metric_key_prefix="eval"
        )
        trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
