"""Trains one model towards another with DeepSpeed alone: the other's engine has no optimizer and is made first."""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
from lines import Lines, pad  # type: ignore[import-not-found]
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained("model")
    teacher, student = (AutoModelForCausalLM.from_pretrained("model") for _ in range(2))
    lines = Lines("text/train.jsonl", tokenizer, 64)
    loader = DataLoader(
        lines, batch_size=2, shuffle=True, collate_fn=lambda samples: pad(samples, tokenizer.pad_token_id)
    )
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    fixed, *_ = deepspeed.initialize(model=teacher, config=config)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
    config = config | {"zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=student, optimizer=optimizer, config=config)
    engine.train()
    done = 0
    while done < args.steps:
        for batch in loader:
            on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            with torch.no_grad():
                wanted = fixed(**on_device).logits.softmax(-1)
            found = engine(**on_device)
            engine.backward(found.loss + torch.nn.functional.cross_entropy(found.logits, wanted))
            engine.step()
            done += 1
            if done == args.steps:
                break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
