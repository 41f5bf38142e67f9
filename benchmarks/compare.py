"""What people use today beside ladder: on the same hardware, of the same work, in the same run.

    python benchmarks/compare.py FOLDER ROW … [--only WAY …] [--repetitions N] [--steps 50]

A ROW is a workload on some GPUs (ROWS; those of `cpu` run anywhere; `sft` is TRL's own program, for which only ways
count that leave it as it is), a WAY is one of `ways.py`: ladder itself, and with `--allow unchecked-gradients`; DDP,
FSDP2 and the Trainer by hand; the batch size finders of the Trainer, accelerate and Lightning; DeepSpeed's Autotuner,
fast and full. Each way finds a configuration and then trains with it, `--steps` optimizer steps for real, all in ten
minutes. `sft` wants 60: in its first 20 or 30 steps, kernels get ready for lengths that come for the first time.

FOLDER/ROW.json gets a record for each way and repetition, with its date and host (with the start of its first
GPU's UUID), and one that it already holds is not run again:

- `tokens_per_second` over all GPUs, by the median of the last 20 real steps (of ladder: of all; of `sft`: by the mean;
  of other ways by the mean in records of 2026-11-27);
- `wall_seconds` and `gpu_seconds` until there was an answer; `failures` on the way to it;
- `fifty_steps`: whether 50 real steps ran; null where so few were asked for, or so many would have taken too long
  (`steps` says how many ran);
- `peak_device_gib` and `headroom`, the part of the limit that stays free;
- `joules_per_token`, where the GPU counts; `cannot_say`: what this way has no words for at all;
- `answer`, and `why` if it has none or the training failed; `finished`: whether the Autotuner or a search by hand came
  to its own end (by hand in records of machine F and later; before, false in four that are known to be cut off);
- `tried`: each of ladder's trials, with its seconds and what its candidates reached (`trial_seconds` alone in records
  of 2026-11-27).

Lightning needs `lightning`, `lightning-utilities` and `torchmetrics`, the Autotuner `tabulate`: without one, its record
says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from side_by_side import HERE, Work
from ways import WAYS, WAYS_OF_A_SCRIPT, Way

from ladder.machine.gpus import visible_gpus
from ladder.units import gib

_SMALLEST = str(HERE / "models" / "smallest-llama.json")
ROWS: dict[str, Work] = {
    "llama-1b-24gib-32": Work(model="llama-3.2-1b", batch=32, cap_gib=24),
    "llama-1b-24gib-256": Work(model="llama-3.2-1b", batch=256, cap_gib=24),
    "llama-1b-32": Work(model="llama-3.2-1b", batch=32),
    "llama-1b-lora-24gib-32": Work(model="llama-3.2-1b", batch=32, cap_gib=24, lora="r=16,alpha=32"),
    "opt-125m": Work(model="opt-125m", seq_len=512, batch=64),
    "opt-125m-2": Work(model="opt-125m", gpus=2, seq_len=512, batch=64),
    "opt-1.3b-2": Work(model="opt-1.3b", gpus=2, batch=64),
    "llama-2-7b-76gib-2": Work(model="llama-2-7b", gpus=2, batch=64, cap_gib=76),
    "llama-2-7b-40gib-2": Work(model="llama-2-7b", gpus=2, batch=64, cap_gib=40),
    "llama-2-7b-40gib-4": Work(model="llama-2-7b", gpus=4, batch=128, cap_gib=40),
    "roberta-base": Work(model="roberta-base", seq_len=512, batch=64, task="masked-lm"),
    "sft": Work(model="llama-3.2-1b", seq_len=1024, batch=32, is_script=True),
    "sft-lora": Work(model="llama-3.2-1b", seq_len=1024, batch=32, lora="r=16,alpha=32", is_script=True),
    "cpu": Work(model=_SMALLEST, gpus=2, seq_len=32, batch=4),
    "cpu-64mib": Work(model=_SMALLEST, seq_len=128, batch=64, cap_gib=0.0625),
    "cpu-sft": Work(model=_SMALLEST, seq_len=64, batch=8, is_script=True),
}
_MANY = 50
"""Optimizer steps that show that a configuration lasts. Chosen."""
_TWICE = ("llama-1b-24gib-32", "llama-1b-24gib-256", "llama-1b-32")
"""Rows whose spread is of interest."""


def compare(file: Path, row: str, ways: Sequence[str], repetitions: int, steps: int) -> list[dict[str, Any]]:
    """All records of `file`, after those that were missing have been made."""
    records: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    for repetition in range(1, repetitions + 1):
        for name in ways:
            known = {"way": name, "repetition": repetition}
            if name not in _ways(ROWS[row]) or any(known.items() <= record.items() for record in records):
                continue
            records.append(known | {"date": time.strftime("%Y-%m-%d")} | record(ROWS[row], name, steps))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(records, indent=1) + "\n")
            print(json.dumps(records[-1]), flush=True)
    return records


def record(work: Work, name: str, steps: int) -> dict[str, Any]:
    """One way, tried."""
    way, cannot_say = _ways(work)[name]
    with tempfile.TemporaryDirectory() as folder:
        found = way(work, Path(folder), steps)
    return figures(work, found) | {"host": _host(), "cannot_say": cannot_say}


def _ways(work: Work) -> Mapping[str, tuple[Way, list[str]]]:
    return WAYS_OF_A_SCRIPT if work.is_script else WAYS


def figures(work: Work, found: dict[str, Any]) -> dict[str, Any]:
    """The columns of the comparison from what a way found."""
    real = found.get("real") or {}
    made, limit = real.get("steps", 0), work.cap_gib or _memory()
    peak = real.get("peak_device_gib")
    return {
        "tokens_per_second": real.get("tokens_per_second"),
        "wall_seconds": round(found["seconds"], 1),
        "gpu_seconds": round(found["seconds"] * work.gpus, 1),
        "failures": found.get("failures"),
        "fifty_steps": None if 0 < made < _MANY else bool(real),
        "steps": made,
        "peak_device_gib": round(peak, 3) if peak else None,
        "limit_gib": limit,
        "headroom": round(1 - peak / limit, 4) if peak and limit else None,
        "joules_per_token": real.get("joules_per_token"),
        "answer": found.get("answer"),
        "why": None if real else found.get("why"),
        **{key: found[key] for key in ("experiments", "failed", "finished", "tried") if key in found},
    }


def _memory() -> float | None:
    """GiB of a GPU; None on a CPU, whose memory nobody is held to without a limit."""
    gpus = visible_gpus()
    return gib(gpus[0].total_bytes) if gpus else None


def _host() -> str:
    gpus = visible_gpus()
    if gpus:
        return f"{len(gpus)} x {gpus[0].name} ({gpus[0].uuid[:12]})"
    return f"{os.cpu_count()} cores ({platform.machine()}), {psutil.virtual_memory().total / 2**30:.0f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", nargs="+", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument(
        "--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY", help=", ".join(WAYS)
    )
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--steps", type=int, default=_MANY)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what it started ends with it
    whole: list[dict[str, Any]] = []
    for row in options.rows:
        repetitions = options.repetitions or (2 if row in _TWICE else 1)
        whole += compare(options.folder / f"{row}.json", row, options.only, repetitions, options.steps)
    print(f"records={len(whole)} trained={sum(bool(each['steps']) for each in whole)}")


if __name__ == "__main__":
    main()
