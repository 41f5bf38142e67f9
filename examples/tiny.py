"""What the examples share: a tiny Llama with random weights, synthetic tokens, and a report at the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SEQ_LEN = 16
VOCAB = 128


def build_model() -> PreTrainedModel:
    """A Llama of two layers. Your script calls `from_pretrained` here."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=SEQ_LEN,
        )
    )
    return model


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (count, SEQ_LEN), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def weight_sums(model: torch.nn.Module) -> list[float]:
    """A sum for each weight, gathered from all ranks: two such lists show which weights changed."""
    sums = []
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            sums.append(parameter.detach().double().abs().sum().item())
    return sums


def report(name: str, engine: Any, before: list[float], losses: list[float], **extra: Any) -> None:
    """Print the losses on rank 0. If `$REPORT_DIR` is set, write what each rank ran with into it."""
    facts = {
        "losses": losses,
        "changed": sum(a != b for a, b in zip(before, weight_sums(engine.module), strict=True)),
        "num_weights": len(before),
        "stage": engine.zero_optimization_stage(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "clipping": engine.gradient_clipping(),
        "dtype": str(engine.get_data_types()[0]),
        "optimizer_steps": engine.global_steps,
        "learning_rate": engine.get_lr()[0],
        "master_dtype": str(engine.optimizer.master_weights_and_grads_dtype),
        "optimizer": type(engine.basic_optimizer).__name__,
        "moments_of_8_bits": any(
            value.dtype == torch.uint8
            for state in engine.basic_optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
        "partitioned_weights": sum(hasattr(parameter, "ds_id") for parameter in engine.module.parameters()),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        **extra,
    }
    if os.environ["RANK"] == "0":
        print(f"{name}: ZeRO stage {facts['stage']}, losses {', '.join(f'{loss:.4f}' for loss in losses)}")
    if "REPORT_DIR" in os.environ:
        Path(os.environ["REPORT_DIR"], f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(facts))


def leave() -> NoReturn:
    """Leave at once: one of torch's threads sometimes aborts the process while the interpreter shuts down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
