"""What each estimator of memory says before any trial, against the peaks that were recorded on real GPUs.

    python benchmarks/estimators.py FILE.json

Recorded are the allocated bytes of the fullest rank, of every candidate that fitted: full training and adapters
(`physics.py` says which files). Each estimator is asked only what it has words for, and each figure is compared with
allocated bytes, which leave out the CUDA context and the allocator's cache: that is the kinder comparison for all that
know nothing of either.

- `ladder`: the search's model before any trial, as `ladder plan` has it;
- `deepspeed`: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`, which know stages 2
  and 3, offload and ranks, but no activations;
- `accelerate`: `accelerate estimate-memory`, one figure for a model, asked only about what is neither sharded nor
  offloaded;
- `llm-analysis`, where it is installed (`pip install --no-deps llm-analysis fire termcolor`): stages, ranks,
  micro-batch and checkpointing, no offload and no adapters.

FILE.json gets a row for each estimator, kind of training and family of models: the candidates that it speaks of, the
mean of the absolute error, the worst, and what ladder's errors are on the same candidates.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from physics import ADAPTERS, Seen, of_sweeps, recorded

from ladder.search.memory import predict_memory
from ladder.workload.workload import ModelShape

Estimator = Callable[[Seen], float | None]
"""Bytes of a GPU, or None for what it has no words for."""


def ladder_says(seen: Seen) -> float:
    """The search's own model, without a trial."""
    said = predict_memory(seen.workload, seen.candidate, world_size=seen.ranks, device="cuda")
    return float(max(said.moments.values()))


def deepspeed_says(seen: Seen) -> float | None:
    """DeepSpeed's two functions."""
    rung, model = seen.candidate.engine.rung, seen.workload.model
    if rung.stage < 2 or "nvme" in rung.devices or seen.workload.lora:
        return None
    on_host, ranks = rung.offload_optimizer != "none", {"num_gpus_per_node": seen.ranks}
    if rung.stage == 2:
        return float(estimate_zero2_model_states_mem_needs(model.num_parameters, cpu_offload=on_host, **ranks)[1])
    params_on_host = rung.offload_param != "none"
    if params_on_host and not on_host:  # it counts parameters on the host only beside the optimizer
        return None
    _, largest = _sizes(_key(model))
    bytes_each = 4  # as `calculate_maximum_sizes` counts, in 32 bits
    return float(
        estimate_zero3_model_states_mem_needs(
            model.num_parameters,
            largest // bytes_each,
            cpu_offload=on_host,
            cpu_offload_params=params_on_host,
            **ranks,
        )[1]
    )


def accelerate_says(seen: Seen) -> float | None:
    """The last column of `accelerate estimate-memory --dtypes float16`, which stands for mixed precision."""
    rung = seen.candidate.engine.rung
    if rung.devices or seen.workload.lora or (rung.stage > 0 and seen.ranks > 1):
        return None
    total, _ = _sizes(_key(seen.workload.model))
    return float(max(estimate_training_usage(total, "float16").values()))


def llm_analysis_says(seen: Seen) -> float | None:
    """The sum that its own report makes of weights, gradients, states and activations."""
    rung, model, candidate = seen.candidate.engine.rung, seen.workload.model, seen.candidate
    if rung.devices or seen.workload.lora or candidate.offload_activations or candidate.checkpoint_every > 1:
        return None
    if model.intermediate_size % model.hidden_size:  # its ModelConfig asserts that, so Llama-2-7B is refused
        return None
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
    from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name

    config = ModelConfig(
        name=model.name,
        num_layers=model.num_layers,
        n_head=model.num_heads,
        hidden_dim=model.hidden_size,
        vocab_size=model.vocab_size,
        max_seq_len=model.max_positions,
        num_key_value_heads=model.num_kv_heads,
        ffn_embed_dim=model.intermediate_size,
    )
    recomputed = ActivationRecomputation.FULL if candidate.checkpoint_every else ActivationRecomputation.NONE
    said = LLMAnalysis(
        config,
        replace(get_gpu_config_by_name("a100-sxm-80gb"), mem_per_GPU_in_GB=1_000_000),  # what does not fit is refused
        get_dtype_config_by_name("w16a16e16"),
        ParallelismConfig(dp_size=seen.ranks),
    ).training(
        batch_size_per_gpu=candidate.micro_batch,
        gradient_accumulation_steps=candidate.accumulation,
        seq_len=seen.workload.seq_len,
        activation_recomputation=recomputed,
        ds_zero=DSZeRO(rung.stage),
        mlp_gated_linear_units=model.gated_mlp,
    )
    return float(said["(weight+op_state+grad)_memory_per_gpu"] + said["activation_memory_per_gpu"])


@cache
def _sizes(config: str) -> tuple[int, int]:
    """Bytes of a model in 32 bits, and of its largest layer."""
    raw = json.loads(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32
        )
    total, (largest, _) = calculate_maximum_sizes(model)
    return int(total), int(largest)


def _key(model: ModelShape) -> str:
    return json.dumps({key: value for key, value in model.config.items() if key not in ("torch_dtype", "dtype")})


def estimators() -> dict[str, Estimator]:
    """By name, those that are installed."""
    found: dict[str, Estimator] = {"ladder": ladder_says, "deepspeed": deepspeed_says, "accelerate": accelerate_says}
    try:
        import llm_analysis.logger
    except ImportError:
        return found
    llm_analysis.logger.logger.setLevel(logging.ERROR)
    return {**found, "llm-analysis": llm_analysis_says}


def compared(all_seen: list[Seen], found: Mapping[str, Estimator]) -> list[dict[str, Any]]:
    """A row for each estimator, kind of training and family that it speaks of."""
    groups: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for seen in all_seen:
        kind = "adapters" if seen.workload.lora else "all weights"
        groups[kind, seen.workload.model.model_type].append(seen)
    rows = []
    for (kind, family), own in sorted(groups.items()):
        for name, estimate in found.items():
            said = [(estimate(seen), seen) for seen in own]
            errors = [value / seen.allocated - 1 for value, seen in said if value is not None]
            ours = [ladder_says(seen) / seen.allocated - 1 for value, seen in said if value is not None]
            row: dict[str, Any] = {"training": kind, "family": family, "estimator": name, "recorded": len(own)}
            rows.append(row | {"spoken_of": len(errors), **(_figures("", errors) | _figures("ladder_", ours))})
    return rows


def _figures(prefix: str, errors: list[float]) -> dict[str, float]:
    if not errors:
        return {}
    mean, worst = statistics.mean(map(abs, errors)), max(errors, key=abs)
    return {f"{prefix}mean_error": round(mean, 4), f"{prefix}worst_error": round(worst, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    found = estimators()
    rows = compared([*recorded(), *of_sweeps(ADAPTERS)], found)
    options.file.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    others = [row for row in rows if row["estimator"] != "ladder" and row["spoken_of"]]
    lowest = all(row["ladder_mean_error"] <= row["mean_error"] for row in others)
    print(
        f"estimators={len(found)} candidates={sum(row['spoken_of'] for row in rows if row['estimator'] == 'ladder')}",
        end=" ",
    )
    print(f"ladder_lowest_everywhere={lowest}")


if __name__ == "__main__":
    main()
