# mypy: disable-error-code="import-untyped, import-not-found, attr-defined"
"""Trains on what the model itself writes, as TRL's GRPO example does."""

import json
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, TrlParser


def longer(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    print(f"wrote completions of {[len(each) for each in completion_ids]} tokens", flush=True)
    return [float(len(each.split())) for each in completions]


def main() -> None:
    (arguments,) = TrlParser(GRPOConfig).parse_args_and_config()
    with open("text/train.jsonl") as lines:
        prompts = [" ".join(json.loads(line)["text"].split()[:40]) for line in lines]
    trainer = GRPOTrainer(
        model="model",
        args=arguments,
        reward_funcs=longer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained("model", padding_side="left"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
