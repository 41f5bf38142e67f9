# mypy: disable-error-code="import-untyped, import-not-found"
"""Fine-tunes a causal language model in a loop of its own, with accelerate."""

from __future__ import annotations

import argparse
import math
import os
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

Loader = DataLoader[dict[str, torch.Tensor]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--output_dir", default="loop-out")
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--max_train_steps", type=int, help="overrides the number of epochs")
    parser.add_argument("--checkpointing_steps", default="", help="a number, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def loaders(args: argparse.Namespace, tokenizer: Any, accelerator: Accelerator) -> tuple[Loader, Loader]:
    """Of the training samples and of those held out."""
    texts = load_dataset("json", data_files=args.train_file, split="train").train_test_split(test_size=0.1, seed=1)

    def in_blocks(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = list(chain.from_iterable(rows["input_ids"]))
        blocks = [ids[end - args.block_size : end] for end in range(args.block_size, len(ids) + 1, args.block_size)]
        return {"input_ids": blocks, "attention_mask": [[1] * args.block_size for _ in blocks], "labels": blocks}

    with accelerator.main_process_first():
        ids = texts.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
        blocks = ids.map(in_blocks, batched=True, remove_columns=ids["train"].column_names)
    shared = {"collate_fn": default_data_collator, "batch_size": args.per_device_train_batch_size}
    return DataLoader(blocks["train"], shuffle=True, **shared), DataLoader(blocks["test"], **shared)


def evaluate(model: torch.nn.Module, loader: Loader, accelerator: Accelerator) -> float:
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(batch["input_ids"].shape[0])))
    return float(torch.cat(losses).mean())


def count(bar: Any) -> None:
    if Accelerator().is_local_main_process:  # as helpers do that have no other way to ask
        bar.update(1)


def main() -> None:
    args = parse_args()
    tracking = {"log_with": "all", "project_dir": args.output_dir} if args.with_tracking else {}
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, **tracking)
    set_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    train_loader, eval_loader = loaders(args, tokenizer, accelerator)
    decays = {name: not name.endswith(("bias", "norm.weight")) for name, _ in model.named_parameters()}
    groups = [
        {"params": [each for name, each in model.named_parameters() if decays[name] == which], "weight_decay": decay}
        for which, decay in ((True, 0.01), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    steps_of_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    steps = args.max_train_steps or args.num_train_epochs * steps_of_epoch
    scheduler = get_scheduler("linear", optimizer, 0, steps * accelerator.num_processes)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    steps_of_epoch = math.ceil(len(train_loader) / args.gradient_accumulation_steps)
    steps = args.max_train_steps or args.num_train_epochs * steps_of_epoch
    if args.with_tracking:
        accelerator.init_trackers("causal_loop", vars(args))

    done = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        done = int(args.resume_from_checkpoint.rstrip("/").rsplit("_", 1)[-1])
    bar = tqdm(total=steps, initial=done, disable=not accelerator.is_local_main_process)
    for epoch in range(done // steps_of_epoch, math.ceil(steps / steps_of_epoch)):
        model.train()
        total = 0.0
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += float(loss.detach())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                count(bar)
                done += 1
                if args.checkpointing_steps.isdigit() and done % int(args.checkpointing_steps) == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{done}"))
            if done >= steps:
                break
        eval_loss = evaluate(model, eval_loader, accelerator)
        accelerator.print(f"epoch {epoch}: perplexity {math.exp(eval_loss):.2f}")
        if args.with_tracking:
            accelerator.log(
                {"train_loss": total / len(train_loader), "eval_loss": eval_loss, "epoch": epoch}, step=done
            )
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"step_{done}"))

    weights = accelerator.get_state_dict(model)  # on every rank: each may have a part of them
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=weights)
        tokenizer.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
