"""Fine-tunes a causal language model with DeepSpeed alone, without a trainer.

deepspeed deepspeed_loop.py --model-path model --data text/train.jsonl --deepspeed --deepspeed_config ds_config.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer


class Lines(Dataset[list[int]]):
    """The texts of a jsonl file as token ids, cut to `longest`."""

    def __init__(self, path: str, tokenizer: Any, longest: int) -> None:
        with open(path) as file:
            texts = [json.loads(line)["text"] for line in file]
        self.ids: list[list[int]] = [tokenizer(text)["input_ids"][:longest] for text in texts]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> list[int]:
        return self.ids[index]


def pad(samples: list[list[int]], filler: int) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids in samples)
    ids = torch.tensor([each + [filler] * (width - len(each)) for each in samples])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--save", default=None, help="folder for the checkpoints")
    parser.add_argument("--batch-size", type=int, default=4, help="of one process; as in the DeepSpeed configuration")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=0, help="micro-steps; 0: all of the data")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "-1")))
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.local_rank >= 0:
        get_accelerator().set_device(args.local_rank)
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_path)
    lines = Lines(args.data, tokenizer, args.max_length)
    sampler: DistributedSampler[list[int]] = DistributedSampler(lines, seed=args.seed)
    loader = DataLoader(
        lines,
        batch_size=args.batch_size,
        sampler=sampler,
        drop_last=True,
        collate_fn=lambda samples: pad(samples, tokenizer.pad_token_id),
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=[each for each in model.parameters() if each.requires_grad]
    )

    done = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for batch in loader:
            on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            loss = engine(**on_device, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            done += 1
            if done % 5 == 0 and torch.distributed.get_rank() == 0:
                print(f"epoch {epoch} micro-step {done} loss {loss.item():.4f}", flush=True)
            if done == args.max_steps:
                break
        if args.save:
            engine.save_checkpoint(args.save, tag=f"epoch{epoch}")
        if done == args.max_steps:
            break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
