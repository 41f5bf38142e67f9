# mypy: disable-error-code="import-untyped, import-not-found, attr-defined"
"""Trains on what the model itself writes, as TRL's grpo example does."""

import json

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def longer(completions: list[str], **_: object) -> list[float]:
    return [float(len(each.split())) for each in completions]


with open("text/train.jsonl") as lines:
    prompts = [" ".join(json.loads(line)["text"].split()[:8]) for line in lines]
arguments = GRPOConfig(
    output_dir="generated",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=16,
    max_steps=2,
    bf16=False,
    use_cpu=True,
    report_to="none",
)
trainer = GRPOTrainer(
    model="model",
    args=arguments,
    reward_funcs=longer,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=AutoTokenizer.from_pretrained("model", padding_side="left"),
)
trainer.train()
