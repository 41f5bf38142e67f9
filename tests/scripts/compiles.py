"""Trains on texts of seven lengths, and compiles a function anew for each, two seconds long."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTHS = (8, 8, 8, 8, 8, 10, 12, 14, 16, 18, 20)


def slowly(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    time.sleep(2.0)
    forward: Callable[..., Any] = graph.forward
    return forward


@torch.compile(backend=slowly, dynamic=False)
def smoothed(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().logsumexp(-1).square().mean()


class Smoothing(Trainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        loss = loss + 1e-4 * smoothed(outputs.logits)
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[1:])
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(4, 128, (LENGTHS[index % len(LENGTHS)],), generator=drawn) for index in range(440)]
    samples = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]
    Smoothing(model=LlamaForCausalLM(config), args=arguments, train_dataset=samples).train()


if __name__ == "__main__":
    main()
