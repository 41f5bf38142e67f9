"""What lies beyond the documented ladder brings: the same tune with and without it, side by side.

    python benchmarks/beyond_the_ladder.py FILE.json [MODEL] [--gpus 1] [--caps 12 40] [--batches 32 256] …

For each limit of GPU memory (GiB) and each global batch, two tunes on the same machine in one run: the documented
ladder with torch's allocator as it comes, and with all that lies beyond it: more rungs, half checkpointing, Liger's
kernels, and segments that grow. FILE.json gets both answers with their trials' seconds; a tune that it already holds is
not run again, and one that was interrupted goes on. The last line is, for each case, `CAP/BATCH=RATIO` of tokens/s, and
`seconds_ratio` of the tunes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import ladder
from ladder.errors import NothingFitsError
from ladder.units import gib

_BEYOND = "+beyond"
_MODEL = Path(__file__).parent / "models" / "large-vocabulary-1.5b.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("model", nargs="?", default=str(_MODEL))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--caps", type=int, nargs="+", default=[12, 40], help="GiB of GPU memory")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256], help="sequences per optimizer step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--machine", help="a machine on paper instead of this one")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = json.loads(options.file.read_text()) if options.file.exists() else {}
    for cap in options.caps:
        for batch in options.batches:
            for beyond in (False, True):
                name = f"{cap}/{batch}{_BEYOND if beyond else ''}"
                if name not in found:
                    found[name] = tuned(options, cap, batch, beyond)
                    options.file.write_text(json.dumps(found, indent=2) + "\n")
                print(f"{name}: {found[name]}", flush=True)
    print(last_line(found))


def tuned(options: argparse.Namespace, cap: int, batch: int, beyond: bool) -> dict[str, Any]:
    """The answer of one tune, or why there is none."""
    folder = options.file.with_suffix("") / f"{cap}-{batch}{'-beyond' if beyond else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{beyond}"
    paper = {"launcher": "simulated", "machine": options.machine} if options.machine else {}
    tune = ladder.tune(
        options.model,
        gpus=options.gpus,
        gpu_memory=f"{cap}GiB",
        global_batch_size=batch,
        seq_len=options.seq_len,
        documented=not beyond,
        liger=beyond,
        run_dir=folder / "run",
        output=folder / "best_config.json",
        **paper,
    )
    seconds = round(sum(sum(phases.values()) for phases in tune.output.trial_seconds.values()), 1)
    try:
        best = tune.best
    except NothingFitsError as error:
        return {"seconds": seconds, "answer": None, "why": str(error)}
    return {
        "seconds": seconds,
        "answer": best.candidate.key,
        "tokens_per_second": round(best.tokens_per_second, 1),
        "peak_device_gib": gib(best.measurement.peak_device),
        "trials": len(tune.output.trial_seconds),
    }


def last_line(found: dict[str, dict[str, Any]]) -> str:
    pairs = [(name, plain, found[name + _BEYOND]) for name, plain in found.items() if name + _BEYOND in found]
    ratios = [
        f"{name}={beyond['tokens_per_second'] / plain['tokens_per_second']:.2f}"
        for name, plain, beyond in pairs
        if plain["answer"] and beyond["answer"]
    ]
    price = sum(beyond["seconds"] for *_, beyond in pairs) / sum(plain["seconds"] for _, plain, _ in pairs)
    return " ".join([*ratios, f"seconds_ratio={price:.2f}"])


if __name__ == "__main__":
    main()
