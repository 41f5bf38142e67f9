# mypy: disable-error-code="import-untyped, import-not-found, misc, attr-defined"
"""Trainings that write, for each rank, what every optimizer step trained on and with which learning rate.

`way` says how it trains, `samples` is a multiple of the global batch; the others are as TrainingArguments has them.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from few import SIZES, model, rows
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import Trainer, TrainingArguments, get_scheduler, set_seed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("way")
parser.add_argument("--per_device_train_batch_size", type=int, default=1)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
parser.add_argument("--num_train_epochs", type=int, default=3)
parser.add_argument("--max_train_steps", type=int, default=0)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
set_seed(1)
log = Path("logs") / f"rank{os.environ['RANK']}.jsonl"


def follow(trained: Any) -> None:
    """Write down the sequences of `trained` and its optimizer's steps."""
    seen: list[list[int]] = []

    def forward(_: Any, given: Any, named: Any) -> None:
        ids, mask = named.get("input_ids", given[0] if given else None), named.get("attention_mask")
        if torch.is_grad_enabled():
            mask = torch.ones_like(ids) if mask is None else mask
            seen.extend(row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True))

    def stepped(optimizer: Any, *_: Any) -> None:
        if seen:  # DeepSpeed's steps once for each of its groups
            with log.open("a") as file:
                file.write(json.dumps({"lr": optimizer.param_groups[0]["lr"], "rows": seen}) + "\n")
            seen.clear()

    log.parent.mkdir(exist_ok=True)
    trained.register_forward_pre_hook(forward, with_kwargs=True)
    register_optimizer_step_post_hook(stepped)


def arguments(kind: Any = TrainingArguments, **more: Any) -> Any:
    return kind(
        output_dir="out",
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        num_train_epochs=args.num_train_epochs,
        warmup_steps=3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        **more,
    )


def trainer() -> None:
    trained = model()
    follow(trained)
    Trainer(trained, arguments(), train_dataset=rows(args.samples)).train()


def sft() -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trained = model()
    follow(trained)
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows(args.samples)])
    SFTTrainer(trained, arguments(SFTConfig), train_dataset=data, processing_class=tokenizer()).train()


def dpo() -> None:
    from trl import DPOConfig, DPOTrainer

    trained = model()
    follow(trained)
    DPOTrainer(trained, model(), args=arguments(DPOConfig), train_dataset=pairs(), processing_class=tokenizer()).train()


def reward() -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    trained = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1, pad_token_id=0))
    follow(trained)
    RewardTrainer(trained, args=arguments(RewardConfig), train_dataset=pairs(), processing_class=tokenizer()).train()


def pairs() -> Any:
    from datasets import Dataset

    def text(row: Any) -> str:
        return " ".join(f"w{number}" for number in row["input_ids"][:8].tolist())

    both = zip(rows(args.samples), rows(args.samples), strict=True)
    return Dataset.from_list([{"prompt": "w1 ", "chosen": text(one), "rejected": text(other)} for one, other in both])


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w0")


def no_trainer() -> None:
    """As transformers' example without a trainer: steps from the length of the loader, before and after `prepare`."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    trained = model()
    follow(trained)
    loader: Any = DataLoader(rows(args.samples), batch_size=args.per_device_train_batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    each = math.ceil(len(loader) / args.gradient_accumulation_steps)
    steps = args.max_train_steps or args.num_train_epochs * each
    ranks = 1 if args.max_train_steps else accelerator.num_processes
    schedule = get_scheduler("linear", optimizer, 3, steps if not args.max_train_steps else steps * ranks)
    trained, optimizer, loader, schedule = accelerator.prepare(trained, optimizer, loader, schedule)
    each = math.ceil(len(loader) / args.gradient_accumulation_steps)
    steps = args.max_train_steps or args.num_train_epochs * each
    made = 0
    for _ in range(math.ceil(steps / each)):
        trained.train()
        for batch in loader:
            with accelerator.accumulate(trained):
                accelerator.backward(trained(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            made += accelerator.sync_gradients
            if made >= steps:
                break


def instruct() -> None:
    """As open-instruct's: clipped, with a schedule of all ranks, and a loop that ends by its own count."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, split_batches=False)
    trained = model()
    follow(trained)
    loader: Any = DataLoader(rows(args.samples), batch_size=args.per_device_train_batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, fused=False)
    trained, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    each = math.ceil(len(loader) / args.gradient_accumulation_steps)
    steps, made = args.max_train_steps or args.num_train_epochs * each, 0
    schedule: Any = get_scheduler("linear", optimizer, 3 * accelerator.num_processes, steps * accelerator.num_processes)
    schedule = accelerator.prepare(schedule)
    for _ in range(math.ceil(steps / each)):
        trained.train()
        for batch in loader:
            with accelerator.accumulate(trained):
                accelerator.backward(trained(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            made += accelerator.sync_gradients
            if made >= steps:
                break


def raw_deepspeed() -> None:
    import deepspeed

    deepspeed.init_distributed()
    trained = model()
    follow(trained)
    data = rows(args.samples)
    sampler: Any = DistributedSampler(data, seed=1)
    loader: Any = DataLoader(data, batch_size=args.per_device_train_batch_size, sampler=sampler)
    config = {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    steps = (
        args.num_train_epochs
        * args.samples
        // (2 * args.per_device_train_batch_size * args.gradient_accumulation_steps)
    )
    schedule = get_scheduler("linear", optimizer, 3, steps)
    engine, *_ = deepspeed.initialize(model=trained, optimizer=optimizer, lr_scheduler=schedule, config=config)
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()


globals()[args.way]()
