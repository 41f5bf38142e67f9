"""A loop with DeepSpeed that counts its micro-steps itself: the configuration does not say how many it accumulates."""

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
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--micro-steps", type=int, default=1000)
    args = parser.parse_args()
    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model")
    loader = DataLoader(
        Lines("text/train.jsonl", tokenizer, 64),
        batch_size=args.batch_size,
        shuffle=True,
        collate_fn=lambda samples: pad(samples, tokenizer.pad_token_id),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": args.batch_size, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()
    done = 0
    while done < args.micro_steps:
        for batch in loader:
            done += 1
            engine.set_gradient_accumulation_boundary(done % args.accumulate == 0)
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            if done == args.micro_steps:
                break
    print(f"{engine.global_steps} optimizer steps, {done} micro-steps of {batch['input_ids'].shape[0]}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
