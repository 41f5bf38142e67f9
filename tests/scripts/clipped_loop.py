# mypy: disable-error-code="import-untyped, import-not-found, attr-defined, no-untyped-call"
"""A loop with accelerate that clips its gradients, and says how far each optimizer step moved the weights."""

import argparse
import json
from typing import Any

import torch
from accelerate import Accelerator
from deepspeed.utils import safe_get_full_fp32_param
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, set_seed


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All of them, in 32 bits: those of 16 hide short steps."""
    full = [safe_get_full_fp32_param(each) if hasattr(model, "module") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten().clone() for each in full])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_grad_norm", type=float, default=0.05)
    parser.add_argument("--num_train_epochs", type=int, default=1)
    parser.add_argument("--max_train_steps", type=int, default=1_000_000)
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained("model")
    with open("text/train.jsonl") as lines:
        rows: Any = [tokenizer(json.loads(line)["text"], truncation=True, max_length=64) for line in lines]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader: Any = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)
    model = AutoModelForCausalLM.from_pretrained("model")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    now, done = weights(model), 0
    for _ in range(args.num_train_epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                before, now = now, weights(model)
                done += 1
                accelerator.print(f"moved by {float((now - before).norm()):.4f}", flush=True)
            if done == args.max_train_steps:
                return


if __name__ == "__main__":
    main()
