"""Would what ladder does not try be faster? Real trials of one engine with and without a technique, side by side.

    python benchmarks/untried.py FILE.json MODEL --engine zero2+liger [--technique compile] [--checkpointing on]
        [--micro-batches 4 8] [--accumulation 2] [--seq-len 1024] [--gpus 1] [--gpu-memory 24GiB] [--layers N]

Techniques: `compile` (torch.compile, the way accelerate switches it on under DeepSpeed), `deepcompile` (DeepSpeed's
passes on top of it), or a JSON object that is merged into the engine's DeepSpeed configuration. One that wins nowhere
has no place among the rungs.

Each micro-batch is a trial of its own: what a technique prepares for one, it prepares again for the next. FILE.json
gets a row for each; a row that it already holds is not run again. The last line is, for each technique and micro-batch,
its tokens/s over those of the reference engine, `-` where not both of them fit.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ladder.backends.registry import backend_of
from ladder.candidates import CHECKPOINTING, Candidate, Engine
from ladder.events.outcome import Record
from ladder.events.step_policy import StepPolicy
from ladder.events.verdict import judge, trial_seconds
from ladder.launch.base import Deadlines
from ladder.launch.counting import counting
from ladder.launch.local import LocalLauncher
from ladder.launch.operator_builds import build_operators
from ladder.launch.rank_environment import rank_environment
from ladder.machine.described import Machine
from ladder.machine.machine import detect_machine
from ladder.techniques.keys import engine_named
from ladder.tuning.trial_request import candidate_spec, engine_config, trial_spec
from ladder.units import gib, parse_bytes
from ladder.workload.shapes import with_layers
from ladder.workload.source import resolve_model
from ladder.workload.workload import ModelShape, Workload

_PLAIN = "plain"
_SETTINGS: dict[str, dict[str, Any]] = {
    _PLAIN: {},
    "compile": {},
    "deepcompile": {"compile": {"deepcompile": True}},
    "adam-8bit-torchao": {"zero_allow_untested_optimizer": True},
    "zenflow": {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "zenflow": {"select_strategy": "step", "select_interval": 16, "update_interval": 4, "overlap_step": True}
        },
    },
    "quantized-communication": {
        "zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    },
}
"""By technique, what it adds to DeepSpeed's configuration; what it does in the ranks is said in techniques.py."""


def settings_of(technique: str) -> dict[str, Any]:
    """What `technique` adds to DeepSpeed's configuration. ValueError for one that is not known."""
    if technique.startswith("{"):
        return dict(json.loads(technique))
    if technique not in _SETTINGS:
        raise ValueError(f"{technique!r} is none of {', '.join(_SETTINGS)} and no JSON object")
    return _SETTINGS[technique]


def known(technique: str) -> str:
    """`technique`, unless it is a typing error, which would pass for the reference engine."""
    settings_of(technique)
    return technique


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`, object by object."""
    result = dict(config)
    for name, value in changes.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("model")
    parser.add_argument("--engine", default="zero2", help="an engine's name without knobs")
    parser.add_argument("--technique", type=known, action="append", default=[])
    parser.add_argument("--checkpointing", default="on")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1])
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--gpu-memory")
    parser.add_argument("--layers", type=int, help="of the model, fewer than it has")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.file.read_text()) if options.file.exists() else []
    done = {(row["engine"], row["checkpointing"], row["micro_batch"], row["technique"]) for row in rows}
    for technique in (_PLAIN, *options.technique):
        wanted = [
            size
            for size in options.micro_batches
            if (options.engine, options.checkpointing, size, technique) not in done
        ]
        for row in measured(options, technique, wanted):
            print(row, flush=True)
            rows.append(row)
            options.file.write_text(json.dumps(rows, indent=1) + "\n")
    print(last_line(rows))


def measured(options: argparse.Namespace, technique: str, micro_batches: list[int]) -> Iterator[dict[str, Any]]:
    """A row for each micro-batch, one trial after another from one server that knows the technique."""
    memory = parse_bytes(options.gpu_memory) if options.gpu_memory else None
    machine = detect_machine(gpus=options.gpus, gpu_memory=memory, host_memory=None, nvme_path=None)
    model = resolve_model(options.model, count=counting())
    if options.layers:
        model = with_layers(model, options.layers)
    engine, task = engine_named(options.engine), model.task
    every, is_offloaded = CHECKPOINTING[options.checkpointing]
    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(server(machine, model, engine, technique, scratch)) as trials,
    ):
        for size in micro_batches:
            candidate = Candidate(engine, every, size, options.accumulation, is_offloaded)
            batch = candidate.sequences(machine.world_size)
            workload = Workload(model=model, task=task, seq_len=options.seq_len, global_batch_size=batch)
            config = engine_config(workload, [candidate], machine.world_size, None)
            spec = trial_spec(
                f"{size:04d}",
                Path(scratch) / f"{size:04d}",
                workload,
                machine,
                engine,
                merged(config, settings_of(technique)),
                [candidate_spec(candidate)],
                steps=StepPolicy(minimum=3, seconds=10.0),
            )
            run = trials.run(spec, Deadlines(), lambda rank, event: None)
            yield {
                "engine": engine.name,
                "checkpointing": options.checkpointing,
                "micro_batch": size,
                "technique": technique,
                "accumulation": options.accumulation,
                "seq_len": options.seq_len,
                "gpu_memory": options.gpu_memory,
                "layers": model.num_layers,
                **row_of(judge(run, workload, [candidate])[-1], trial_seconds(run)),
            }


def server(machine: Machine, model: ModelShape, engine: Engine, technique: str, folder: str) -> LocalLauncher:
    """A launcher whose ranks know `technique`; the operators they need are built."""
    here = str(Path(__file__).resolve().parent)
    environment = rank_environment(machine) | {
        "LADDER_BENCHMARK_TECHNIQUE": technique,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
    }
    operators = [
        *backend_of(engine.rung).operators(engine.rung, "adamw"),
        *(["shm_comm"] if machine.device == "cpu" else []),
    ]
    build_operators(operators, environment)
    task = model.task
    return LocalLauncher(
        marker=f"ladder-benchmark-{os.getpid()}",
        job={"model_config": dict(model.config), "task": task, "operators": operators, "preload": ["techniques"]},
        environment=environment,
        log=Path(folder) / "server.log",
        gpu_uuids=tuple(gpu.uuid for gpu in machine.gpus),
    )


def row_of(record: Record, seconds: Mapping[str, float]) -> dict[str, Any]:
    """What came of one trial: speed, memory, the first losses, and the seconds before the first timed step."""
    row = {"outcome": record.outcome.kind, "warmup_seconds": round(seconds.get("warmup", 0.0), 1)}
    seen, speed = record.measurement, record.tokens_per_second
    if seen is None or speed is None:
        return row | {"tokens_per_second": None, "why": record.outcome.sentence}
    return row | {
        "tokens_per_second": round(speed, 1),
        "peak_device_gib": gib(seen.peak_device),
        "peak_allocated_gib": gib(seen.peak_allocated),
        "host_gib": gib(seen.peak_host),
        "losses": [round(loss, 4) for loss in seen.losses[:4]],
    }


def last_line(rows: list[dict[str, Any]]) -> str:
    """Each technique over the reference engine at the same candidate."""
    speeds = {
        (row["engine"], row["checkpointing"], row["micro_batch"], row["technique"]): row["tokens_per_second"]
        for row in rows
    }
    words = []
    for (engine, checkpointing, size, technique), speed in speeds.items():
        plain = speeds.get((engine, checkpointing, size, _PLAIN))
        if technique != _PLAIN:
            ratio = f"{speed / plain:.3f}" if speed and plain else "-"
            words.append(f"{engine}/{checkpointing}/{size}/{technique}={ratio}")
    return " ".join(words)


if __name__ == "__main__":
    main()
