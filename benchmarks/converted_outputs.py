"""What it costs that accelerate converts a model's outputs to 32 bits: a step with and without it, turn by turn.

    python benchmarks/converted_outputs.py [MODEL] [--seq-len 512] [--batch 64] [--turns 5] [--steps 20]

The steps are those of DDP on one GPU in the comparison with other tools: masked language modelling in bf16 by autocast,
AdamW, random tokens. It prints JSON: milliseconds of a step in each turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from one_rank import adam, begin, make_model, now
from side_by_side import Work

_UNTIMED = 4
"""Steps of each kind before the first turn. Chosen: the first makes Adam's states."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="roberta-base")
    for name, number in (("--seq-len", 512), ("--batch", 64), ("--turns", 5), ("--steps", 20)):
        parser.add_argument(name, type=int, default=number)
    options = parser.parse_args()
    work = Work(model=options.model, seq_len=options.seq_len, batch=options.batch, task="masked-lm")
    spec = work.spec("ddp", Path("unused"))
    device = begin(spec)
    model = make_model(spec, device)
    optimizer = adam(model)
    ids = torch.randint(4, model.config.vocab_size, (work.batch, work.seq_len), device=device)
    as_it_is = torch.autocast(device.type, torch.bfloat16)(model.forward)
    kinds = {"as they are": as_it_is, "converted": convert_outputs_to_fp32(as_it_is)}
    milliseconds: dict[str, list[float]] = {name: [] for name in kinds}

    def train(forward: Callable[..., object], steps: int) -> float:
        """Seconds of a step."""
        began = now(device)
        for _ in range(steps):
            forward(input_ids=ids, labels=ids).loss.backward()  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        return (now(device) - began) / steps

    for forward in kinds.values():
        train(forward, _UNTIMED)
    for _ in range(options.turns):
        for name, forward in kinds.items():
            train(forward, 1)
            milliseconds[name].append(round(1000 * train(forward, options.steps), 2))
    print(json.dumps({"model": work.model, "milliseconds": milliseconds}))


if __name__ == "__main__":
    main()
