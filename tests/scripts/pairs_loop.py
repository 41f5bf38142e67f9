# mypy: disable-error-code="import-untyped, import-not-found"
"""Decides whether the first of two sentences is the longer one: a plain loop, made ready for several GPUs."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from datasets import load_dataset
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup, set_seed

MAX_BATCH_SIZE = 16  # what a small GPU holds; larger batches are accumulated
EVAL_BATCH_SIZE = 32


def get_loaders(accelerator: Accelerator, args: argparse.Namespace, batch_size: int) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_dataset("json", data_files=args.data, split="train").train_test_split(test_size=0.2, seed=3)

    def encode(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["sentence1"], batch["sentence2"], truncation=True, max_length=None)

    with accelerator.main_process_first():
        rows = rows.map(encode, batched=True, remove_columns=["sentence1", "sentence2"]).rename_column(
            "label", "labels"
        )

    def collate(samples: list[dict[str, Any]]) -> Any:
        multiple = 8 if accelerator.mixed_precision not in ("no", "fp8") else None
        return tokenizer.pad(samples, padding="longest", pad_to_multiple_of=multiple, return_tensors="pt")

    return (
        DataLoader(rows["train"], shuffle=True, collate_fn=collate, batch_size=batch_size, drop_last=True),
        DataLoader(rows["test"], shuffle=False, collate_fn=collate, batch_size=EVAL_BATCH_SIZE),
    )


def train(settings: dict[str, Any], args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    batch_size, accumulate = int(settings["batch_size"]), 1
    if batch_size > MAX_BATCH_SIZE and accelerator.distributed_type != DistributedType.XLA:
        accumulate = batch_size // MAX_BATCH_SIZE
        batch_size = MAX_BATCH_SIZE
    set_seed(settings["seed"])
    train_loader, eval_loader = get_loaders(accelerator, args, batch_size)

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    model = model.to(accelerator.device)
    optimizer = AdamW(model.parameters(), lr=settings["lr"])
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=5, num_training_steps=len(train_loader) * settings["epochs"] // accumulate
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    for epoch in range(settings["epochs"]):
        model.train()
        for step, batch in enumerate(train_loader):
            batch.to(accelerator.device)
            loss = model(**batch).loss / accumulate
            accelerator.backward(loss)
            if (step + 1) % accumulate == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        hits = total = 0
        for batch in eval_loader:
            batch.to(accelerator.device)
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(dim=-1)
            guesses, truth = accelerator.gather_for_metrics((guesses, batch["labels"]))
            hits += int((guesses == truth).sum())
            total += len(truth)
        accelerator.print(f"epoch {epoch}: {hits} of {total} right")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="masked")
    parser.add_argument("--data", default="labelled/train.jsonl")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], default=None)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    args = parser.parse_args()
    train({"lr": 2e-4, "epochs": 3, "seed": 42, "batch_size": 16}, args)


if __name__ == "__main__":
    main()
