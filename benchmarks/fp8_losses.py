"""How far the losses of FP8 lie from those in 16 bits, beside those of a training that leaves out one step.

    python benchmarks/fp8_losses.py [MODEL] [--seq-len 512] [--steps 5] [--only WAY …]

It trains two layers of MODEL with few tokens in its vocabulary, as the comparison of losses before a proof does, in
each of WAYS: from the same weights, on the same two sequences, with the same rate. It prints JSON: the losses of each
way by micro-step, and how far they are from those in 16 bits, in percent of the first. accelerate converts the layers.
It needs torchao; on a CPU, whose kernels for FP8 are slow, it takes minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.ao import convert_model_to_fp8_ao
from one_rank import CLIP, begin, make_model
from side_by_side import Work
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import Float8GemmConfig

from ladder.launch.counting import counting
from ladder.workload.shapes import with_layers, with_vocabulary
from ladder.workload.source import resolve_model

_RATE = 1e-3
"""Of AdamW in the comparison of losses (ladder/trial/model.py)."""
_LAYERS, _VOCABULARY, _SEQUENCES = 2, 32_000, 2


@dataclass(frozen=True)
class Way:
    """What a training differs in."""

    fp8: bool = False
    compiled: bool = False
    fast_sums: bool = True
    """Products of the forward pass are summed up with less than 32 bits, as is torchao's default."""
    left_out: int | None = None
    """The step that is not made."""


WAYS = {
    "16 bits": Way(),
    "16 bits, compiled": Way(compiled=True),
    "FP8": Way(fp8=True),
    "FP8, sums in 32 bits": Way(fp8=True, fast_sums=False),
    "FP8, compiled": Way(fp8=True, compiled=True),
    "FP8, compiled, sums in 32 bits": Way(fp8=True, compiled=True, fast_sums=False),
    "16 bits, a step left out": Way(left_out=2),
}


def losses(way: Way, spec: dict[str, Any], steps: int, device: torch.device) -> list[float]:
    """By micro-step; an optimizer step follows each second one."""
    torch.compiler.reset()
    model = make_model(spec, device)
    ids = torch.randint(4, model.config.vocab_size, (_SEQUENCES, spec["seq_len"]), device=device)
    if way.fp8:
        sums = Float8GemmConfig(use_fast_accum=way.fast_sums)
        convert_model_to_fp8_ao(model, config=Float8LinearConfig(pad_inner_dim=True, gemm_config_output=sums))
    for layer in model.model.layers if way.compiled else ():
        layer.compile()
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True), []
    for step in range(steps):
        for sequence in ids:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(input_ids=sequence[None], labels=sequence[None]).loss
            (loss / _SEQUENCES).backward()
            seen.append(round(loss.item(), 4))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if step != way.left_out:
            optimizer.step()
        optimizer.zero_grad()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama-3.2-1b")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    options = parser.parse_args()
    shallow = with_vocabulary(with_layers(resolve_model(options.model, count=counting()), _LAYERS), _VOCABULARY)
    work = Work(model=options.model, seq_len=options.seq_len)
    spec = work.spec("ddp", Path("unused"), config=dict(shallow.config), liger=False)
    device = begin(spec)
    names = dict.fromkeys(["16 bits", *options.only])
    found = {name: losses(WAYS[name], spec, options.steps, device) for name in names}
    plain = found["16 bits"]
    apart = {
        name: [round(100 * (one - other) / plain[0], 2) for one, other in zip(own, plain, strict=True)]
        for name, own in found.items()
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    print(json.dumps({"device": name, "model": options.model, "losses": found, "apart_percent": apart}, indent=1))


if __name__ == "__main__":
    main()
