# mypy: disable-error-code="import-untyped, import-not-found, attr-defined"
"""Aligns a model with pairs of answers, of which one is preferred (DPO)."""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer


@dataclass
class Arguments:
    model_name_or_path: str = field(default="model", metadata={"help": "Model to align; also its own reference."})
    train_file: str = field(default="pairs/train.jsonl", metadata={"help": "jsonl: prompt, chosen, rejected."})
    longest_prompt: int = field(default=0, metadata={"help": "Leave longer prompts out (words); 0: keep all."})


def main() -> None:
    arguments, settings = HfArgumentParser((Arguments, DPOConfig)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)

    pairs = load_dataset("json", data_files=arguments.train_file, split="train")
    if arguments.longest_prompt:
        pairs = pairs.filter(lambda row: len(row["prompt"].split()) <= arguments.longest_prompt)
    parts = pairs.train_test_split(test_size=0.1, seed=settings.seed)

    trainer = DPOTrainer(
        model=model,
        args=settings,
        train_dataset=parts["train"],
        eval_dataset=parts["test"] if settings.eval_strategy != "no" else None,
        processing_class=tokenizer,
    )
    trainer.train()
    if settings.eval_strategy != "no":
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.save_model(settings.output_dir)
    if settings.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.train_file)


if __name__ == "__main__":
    main()
