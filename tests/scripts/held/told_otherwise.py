# mypy: disable-error-code="import-untyped, import-not-found, misc"
"""Trainings whose settings stand in files and options of many kinds; `way` says in which."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from few import Training, model, rows
from transformers import Trainer, TrainingArguments


def with_a_trainer(**settings: Any) -> None:
    options: Any = {"output_dir": "out", "report_to": "none", "save_strategy": "no", "max_steps": 12, "use_cpu": True}
    Trainer(model=model(), args=TrainingArguments(**options | settings), train_dataset=rows()).train()


def read(name: str) -> Any:
    import yaml

    return yaml.safe_load(Path(name).read_text())


def names_of_the_trainer(name: str) -> None:
    with_a_trainer(**read(name))


def names_of_its_own(name: str) -> None:
    said = read(name)["train"]
    with_a_trainer(bf16=True, per_device_train_batch_size=said["size"], gradient_accumulation_steps=said["every"])


def one_name_for_two(name: str) -> None:
    size = read(name)["size"]
    with_a_trainer(bf16=True, per_device_train_batch_size=size, gradient_accumulation_steps=size)


def loop(*words: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", type=int, default=4)
    parser.add_argument("--acc", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args(words)
    training = Training(micro_batch=args.bs, gradient_accumulation_steps=args.acc)
    for batch in training.loader:
        with training.accelerator.accumulate(training.model):
            training.step(batch)


def file_of_deepspeed(*words: str) -> None:
    import deepspeed

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(words)
    made: Any = model()
    config = json.loads(Path(args.deepspeed_config).read_text())
    loader: Any = torch.utils.data.DataLoader(rows(), batch_size=config["train_micro_batch_size_per_gpu"])
    engine = deepspeed.initialize(args=args, model=made, optimizer=torch.optim.AdamW(made.parameters()))[0]
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
