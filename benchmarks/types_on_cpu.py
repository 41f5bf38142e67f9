"""Is the memory of any type of model known before a trial? Small models of many types, on real ranks of a CPU.

    python benchmarks/types_on_cpu.py FOLDER [--types 25] [--seconds 900] [--dtype fp32]

Types are those of transformers that learn text and take the sizes of a small model, spread over all in the order of
their names. Each gets a tune of five engines in FOLDER, whose run folder `prior.py` then compares with what was
predicted before any trial; a type that FOLDER already has is not tuned again. The last line is
`types=… candidates=… memory_mean_pct=… memory_worst_pct=…`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from physics import mean_size
from prior import Error, errors_of
from side_by_side import run
from transformers import CONFIG_MAPPING

from ladder.errors import LadderError
from ladder.trial.model_class import auto_class, model_config, tasks_of
from ladder.workload.config_guard import checked_config

_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "moe_intermediate_size": 352,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16_000,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of one small model, by the names that transformers gives them; a type takes those that it knows."""
_PARAMETERS = range(15_000_000, 120_000_000)
"""Chosen: their states are a few times what an interpreter takes, and fit a small host twice."""
_LONGEST = 300.0
"""Seconds of a tune. Chosen: ten times what most take; what was measured by then counts."""
_ENGINES = ("zero0", "zero1", "zero2", "zero3", "ddp")


_APART = 17
"""Chosen: about as many names lie between two types in a row as all have for each type asked for."""


def small_model(name: str) -> dict[str, Any] | None:
    """A configuration of this type that is so small; None if it learns no text, or its sizes must suit one another."""
    try:
        default = CONFIG_MAPPING[name]().to_dict()
        sizes: dict[str, int | None] = {key: value for key, value in _SIZES.items() if key in default}
        sizes |= dict.fromkeys({"layer_types"} & default.keys())
        config = CONFIG_MAPPING[name](**sizes)
        raw, _ = checked_config({**json.loads(config.to_json_string(use_diff=False)), "model_type": name}, name)
        built = model_config(raw)
        with torch.device("meta"):
            model = auto_class(built, tasks_of(built)[0]).from_config(built)
        if sum(each.numel() for each in model.parameters()) not in _PARAMETERS:
            return None
        words = torch.ones(1, 8, dtype=torch.long)
        auto_class(built, tasks_of(built)[0]).from_config(built)(input_ids=words, labels=words)
    except (Exception, LadderError):
        return None
    return raw


def spread() -> Iterator[tuple[str, dict[str, Any]]]:
    """The types that can be so small, with a configuration each: every so many-th of all names, then those between."""
    names = sorted(CONFIG_MAPPING)
    for name in (name for first in range(_APART) for name in names[first::_APART]):
        if (raw := small_model(name)) is not None:
            yield name, raw


def tune(config: Path, folder: Path, dtype: str) -> str:
    """Tune the engines of the model; returns the last line that the tune said."""
    engines = [word for name in _ENGINES for word in ("--rung", name)]
    words = [str(config), "--gpus", "0", "--gpu-memory", "8GiB", "--seq-len", "256", "--global-batch-size", "8"]
    words += ["--dtype", dtype, "--wait"]
    words += [*engines, "--micro-batch", "4", "--strategy", "exhaustive", "--run-dir", str(folder)]
    ended = run(
        [sys.executable, "-m", "ladder", "tune", *words, "--output", str(folder.with_suffix(".best.json"))],
        longest=_LONGEST,
    )
    return (ended.text.strip().splitlines() or [""])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--types", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=900.0, help="no new tune begins after so many")
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    errors: list[Error] = []
    types, until = 0, time.monotonic() + options.seconds
    for name, raw in islice(spread(), options.types):
        run, config = options.folder / name, options.folder / f"{name}.json"
        if not run.exists() and time.monotonic() < until:
            config.write_text(json.dumps(raw))
            print(name, tune(config, run, options.dtype), flush=True)
        try:
            own = list(errors_of(run))
        except (LadderError, OSError) as error:
            print(f"{name:24} {error}")
            continue
        types += bool(own)
        errors += own
        print(f"{name:24} " + " ".join(f"{each.kind}: {each.memory:+.1%}" for each in own), flush=True)
    memory = [each.memory for each in errors]
    print(
        f"types={types} candidates={len(errors)} memory_mean_pct={100 * mean_size(memory):.1f} "
        f"memory_worst_pct={100 * max(memory, key=abs):.1f}"
    )


if __name__ == "__main__":
    main()
