# mypy: disable-error-code="import-untyped, import-not-found, misc, attr-defined"
"""Trainings that write, for each rank, what every optimizer step trained on and with which learning rate.

`way` says how it trains; the options are as TrainingArguments has them. The samples fill all optimizer steps.
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
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaModel, Trainer, TrainingArguments, get_scheduler, set_seed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("way")
parser.add_argument("--per_device_train_batch_size", type=int, default=1)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
parser.add_argument("--num_train_epochs", type=int, default=3)
args = parser.parse_args()
set_seed(1)
log = Path("logs") / f"rank{os.environ['RANK']}.jsonl"


def follow(trained: Any) -> None:
    """Write down the sequences of `trained` and its optimizer's steps."""
    seen: list[list[int]] = []

    def forward(_: Any, given: Any, named: Any) -> None:
        ids, mask = named.get("input_ids", given[0] if given else None), named.get("attention_mask")
        if isinstance(ids, dict):  # sentence-transformers'
            ids, mask = ids["input_ids"], ids["attention_mask"]
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
    """With a second, shorter training."""
    trained = model()
    follow(trained)
    Trainer(trained, arguments(), train_dataset=rows()).train()
    args.num_train_epochs = 1
    Trainer(trained, arguments(), train_dataset=rows()).train()


def drops_last() -> None:
    """Three samples more than fill its optimizer steps."""
    trained, data = model(), rows()
    follow(trained)
    Trainer(trained, arguments(dataloader_drop_last=True), train_dataset=[*data, *data[:3]]).train()


def sft() -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trained = model()
    follow(trained)
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
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

    both = zip(rows(), rows(), strict=True)
    return Dataset.from_list([{"prompt": "w1 ", "chosen": text(one), "rejected": text(other)} for one, other in both])


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w0")


def sentences() -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )

    folder = Path(f"sentences{os.environ['RANK']}")
    LlamaModel(LlamaConfig(**SIZES, pad_token_id=0)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    words = models.Transformer(str(folder))
    trained = SentenceTransformer(modules=[words, models.Pooling(SIZES["hidden_size"])], device="cpu")
    follow(trained)
    data = pairs().remove_columns("rejected")
    own = arguments(SentenceTransformerTrainingArguments)
    loss = losses.MultipleNegativesRankingLoss(trained)
    SentenceTransformerTrainer(trained, own, train_dataset=Dataset.from_dict(data.to_dict()), loss=loss).train()


def no_trainer() -> None:
    """As transformers' example without a trainer: steps from the length of the loader, before and after `prepare`."""
    accelerator, trained, optimizer, loader = to_prepare()
    schedule = get_scheduler("linear", optimizer, 3, args.num_train_epochs * steps_of_epoch(loader))
    trained, optimizer, loader, schedule = accelerator.prepare(trained, optimizer, loader, schedule)
    loop(accelerator, trained, optimizer, loader, schedule)


def instruct() -> None:
    """As open-instruct's: clipped, and with a schedule that is made and prepared once all else is."""
    accelerator, *things = to_prepare()
    trained, optimizer, loader = accelerator.prepare(*things)
    ranks = accelerator.num_processes
    steps = args.num_train_epochs * steps_of_epoch(loader)
    schedule = accelerator.prepare(get_scheduler("linear", optimizer, 3 * ranks, steps * ranks))
    loop(accelerator, trained, optimizer, loader, schedule, clipping=1.0)


def to_prepare() -> tuple[Any, ...]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    trained = model()
    follow(trained)
    loader: Any = DataLoader(rows(), batch_size=args.per_device_train_batch_size, shuffle=True)
    return accelerator, trained, torch.optim.AdamW(trained.parameters(), lr=1e-3), loader


def steps_of_epoch(loader: Any) -> int:
    steps: int = math.ceil(len(loader) / args.gradient_accumulation_steps)
    return steps


def loop(accelerator: Any, trained: Any, optimizer: Any, loader: Any, schedule: Any, clipping: float = 0.0) -> None:
    """It ends by its own count."""
    steps, made = args.num_train_epochs * steps_of_epoch(loader), 0
    while made < steps:
        trained.train()
        for batch in loader:
            with accelerator.accumulate(trained):
                accelerator.backward(trained(**batch).loss)
                if clipping and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained.parameters(), clipping)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            made += accelerator.sync_gradients


def raw_deepspeed(loads: bool = False) -> None:
    """With a loader of its own, or with the one that DeepSpeed makes of its data."""
    import deepspeed

    deepspeed.init_distributed()
    trained = model()
    follow(trained)
    data: Any = rows()
    sampler: Any = DistributedSampler(data, seed=1)
    loader: Any = None if loads else DataLoader(data, batch_size=args.per_device_train_batch_size, sampler=sampler)
    config = {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    schedule = get_scheduler("linear", optimizer, 3, args.num_train_epochs * (8 if loads else steps_of_epoch(loader)))
    given = {"training_data": data, "collate_fn": default_collate} if loads else {}
    engine, _, made, _ = deepspeed.initialize(
        model=trained, optimizer=optimizer, lr_scheduler=schedule, config=config, **given
    )
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        for batch in made or loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()


def deepspeed_loads() -> None:
    raw_deepspeed(loads=True)


globals()[args.way]()
