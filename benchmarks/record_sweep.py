"""Records a sweep for benchmarks/search.py: every candidate, then a probe of every engine that fits.

    python benchmarks/record_sweep.py OUT.json MODEL [--gpus N] [--gpu-memory SIZE] [--host-memory SIZE]
        [--global-batch-size N] [--seq-len N] [--rung RUNG …] [--micro-batch N …] [--nvme-path FOLDER]
        [--lora r=16,…] [--load-in 4bit|8bit] [--run-dir FOLDER] [--caps 40 32 24] [--machine NAME]
    python benchmarks/record_sweep.py OUT.json --from FOLDER|SWEEP.json … [--caps 40 32 24] [--whole]

Started again with the same run folder, it goes on where it was. `--caps` are the limits, in GiB, under which the sweep
is to be played back; without a cap of its own, one sweep serves them all. `--machine` sweeps on paper, to try this out.
`--from` measures nothing: it joins run folders, and files recorded before, in which some rungs each were swept, as far
as they came; `--whole` says that together they were all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.options.tune import TuneOptions
from ladder.report.table import rows
from ladder.runs.stored_run import StoredRun, read_run
from ladder.search.decisions import Measure, Stop
from ladder.search.ledger import Entry, ledger
from ladder.search.policy import STRATEGIES, exhaustive
from ladder.search.space import Space, measured, probed
from ladder.tuning.run import run_tune
from ladder.units import gib, parse_bytes
from ladder.watch.plain import plain_lines
from ladder.workload.lora import lora_from_text

_TRIED = ("fits", "gpu_oom", "host_oom", "pruned")
_FACTS = ("about", "workload", "machine", "sequences_per_rank", "probe_layers")
_COLUMNS = (
    "rung",
    "checkpointing",
    "micro_batch",
    "outcome",
    "accumulate_seconds",
    "boundary_seconds",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "peak_device_gib",
    "host_gib",
)


def sweep_and_probe(space: Space, records: Sequence[Record]) -> Measure | Stop:
    """The exhaustive sweep; then, where the model is deep enough, what fits once more with a few layers."""
    decision = exhaustive(space, records)
    if isinstance(decision, Measure) or not space.probe_layers:
        return decision
    done, known = measured(records), {space.by_key[key].engine for key in probed(records)}
    for engine in space.engines:
        fitting = [
            each for each in space.of_engine(engine) if each.key in done and done[each.key].outcome.kind == "fits"
        ]
        if fitting and engine not in known:
            return Measure(engine, tuple(fitting), f"{space.probe_layers} layers", probe=True)
    return decision


def joined(parts: Sequence[Mapping[str, Any]], caps: Sequence[float], *, whole: bool) -> dict[str, Any]:
    """What benchmarks/recorded.py reads. ValueError where the parts are of different workloads or machines."""
    facts, *others = [{name: part[name] for name in _FACTS} for part in parts]
    if any(other != facts for other in others):
        raise ValueError("These are sweeps of different workloads or machines.")
    return {
        **facts,
        "whole": whole,
        "caps_gib": list(caps) or parts[0].get("caps_gib") or [facts["machine"]["memory_limit_gib"]],
        **{name: [row for part in parts for row in part[name]] for name in ("rows", "probes")},
    }


def recorded(path: Path) -> dict[str, Any]:
    """What a file of this program's or a run folder holds. ValueError for a file that holds less."""
    if path.is_file():
        document = dict(json.loads(path.read_text()))
        if lacking := [name for name in (*_FACTS, "rows", "probes") if name not in document]:
            raise ValueError(f"{path} is no sweep that others can be joined to: it has no {', '.join(lacking)}.")
        return document
    run = read_run(path)
    return {
        **_facts(run.space),
        "rows": [
            {name: row[name] for name in _COLUMNS}
            for row in rows(_plain_entries(run), run.trial_seconds)
            if row["rung"] in RUNGS_BY_NAME and row["outcome"] in _TRIED
        ],
        "probes": [
            _probe_row(run.space.by_key[key], record)
            for key, record in probed(run.records).items()
            if record.measurement
        ],
    }


def _plain_entries(run: StoredRun) -> list[Entry]:
    """The ledger without those with other knobs, which a row has no place for."""
    entries = ledger(run.space, run.records, run.unsupported)
    return [each for each in entries if not each.candidate_key or not run.space.by_key[each.candidate_key].engine.knobs]


def _facts(space: Space) -> dict[str, Any]:
    workload = space.workload
    return {
        "about": f"{workload.model.name} on {space.world_size} × {space.gpu_name}: benchmarks/record_sweep.py",
        "workload": {
            "model": workload.model.name if workload.model.source == "bundled" else dict(workload.model.config),
            **{name: getattr(workload, name) for name in ("task", "seq_len", "dtype", "optimizer")},
            **({"lora": workload.lora.for_peft(), "load_in": workload.load_in} if workload.lora else {}),
        },
        "machine": {
            "gpu_name": space.gpu_name,
            "world_size": space.world_size,
            "memory_limit_gib": gib(space.memory_limit),
            "host_memory_gib": gib(space.host_memory),
            "num_cores": space.num_cores,
        },
        "sequences_per_rank": space.sequences_per_rank,
        "probe_layers": space.probe_layers,
    }


def _probe_row(candidate: Candidate, record: Record) -> dict[str, Any]:
    seen = record.measurement
    assert seen is not None
    figures = [
        candidate.engine.rung.name,
        candidate.checkpointing,
        candidate.micro_batch,
        record.outcome.kind,
        seen.accumulate_seconds,
        seen.boundary_seconds,
        gib(seen.peak_allocated),
        gib(seen.peak_reserved),
        gib(seen.peak_device),
        gib(seen.peak_host),
    ]
    return dict(zip(_COLUMNS, figures, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?")
    for name in ("gpus", "global-batch-size", "seq-len"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("gpu-memory", "host-memory"):
        parser.add_argument(f"--{name}", type=parse_bytes)
    for name in ("nvme-path", "run-dir"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--micro-batch", dest="micro_batches", type=int, action="append", default=[])
    parser.add_argument("--rung", dest="rungs", action="append", default=[])
    for name in ("machine", "lora", "load-in"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--from", dest="parts", type=Path, nargs="+", default=[])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--caps", type=float, nargs="*", default=[])
    asked = vars(parser.parse_args(arguments))
    out, caps, parts, whole = (asked.pop(name) for name in ("out", "caps", "parts", "whole"))
    if bool(parts) == bool(asked["model"]):
        parser.error("give either a model to sweep or --from with what was swept")
    whole = whole or not (parts or asked["rungs"] or asked["micro_batches"])
    document = joined([recorded(path) for path in parts or [sweep(asked)]], caps, whole=whole)
    out.write_text(json.dumps(document, indent=1) + os.linesep)
    return 0


def sweep(asked: Mapping[str, Any]) -> Path:
    """The run folder of the sweep."""
    STRATEGIES["exhaustive"] = sweep_and_probe
    lora = lora_from_text(asked["lora"]) if asked["lora"] else None
    with tempfile.TemporaryDirectory() as elsewhere:  # the run folder keeps a copy of the answer
        options = TuneOptions(
            **{**asked, "micro_batches": tuple(asked["micro_batches"]), "rungs": tuple(asked["rungs"]), "lora": lora},
            strategy="exhaustive",
            switches={"liger": False},  # what is played back are the rungs as they are
            launcher="simulated" if asked["machine"] else "local",
            output=Path(elsewhere) / "best_config.json",
        )
        return run_tune(options, plain_lines).run_dir


if __name__ == "__main__":
    sys.exit(main())
