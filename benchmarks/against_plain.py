"""Is the answer as fast as what one writes by hand? A tune over all backends beside loops of torch and DeepSpeed.

    python benchmarks/against_plain.py FILE.json MODEL [--gpus 1] [--caps 0 24 40] [--seq-len 2048] [--batch 64]
        [--methods ddp fsdp2 fsdp2-kept zero2 zero3 trainer] [--micro-batches 1 2 4 8 16 32] [--checkpointing off on]
        [--lora r=16,alpha=32] [--load-in 4bit] [--backend all] [--seconds 4] [--tune="--host-memory 110GiB"]

For each limit of GPU memory (GiB; 0 is none): `ladder tune`, with the further options that `--tune` has, then
`by_hand.py` by each method, without checkpointing and with it, in processes of its own. `fsdp2-kept` keeps gathered
weights from forward to backward; `trainer` is the Trainer without DeepSpeed. `--seconds` is for how long steps by hand
are timed; one cell costs least with `--seconds 1`, one of `--methods`, one of `--checkpointing` and the few
`--micro-batches` that may be fastest.

FILE.json gets a row for each limit; a row that it already holds is not run again, and what was measured by hand under a
larger limit is used again where it stayed below the smaller one. So give large limits first. The last line is `rows=…`
and `worst`, the least of the answers' tokens/s over those of the fastest by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

from side_by_side import Work, by_hand, tune

_METHODS = ["ddp", "fsdp2", "fsdp2-kept", "zero2", "zero3"]
_LONGEST = 300
"""Seconds of one method. Chosen: far more than any took."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it has started ends with it
    options = _options()
    rows: list[dict[str, Any]] = json.loads(options.file.read_text()) if options.file.exists() else []
    for cap in options.caps:
        case = {"model": options.model, "gpus": options.gpus, "cap_gib": cap or None}
        case |= {"lora": options.lora, "load_in": options.load_in}
        if any(case.items() <= row.items() for row in rows):
            continue
        row = case | {"seq_len": options.seq_len, "batch": options.batch}
        larger = [each for each in rows if _is_under_a_larger_limit(each, row)]
        limits = {"seq_len": options.seq_len, "batch": options.batch, "cap_gib": cap or None}
        work = Work(model=options.model, gpus=options.gpus, lora=options.lora, load_in=options.load_in, **limits)
        row["answer"] = _tuned(options, work)
        print(json.dumps(row), flush=True)  # what a run that is cut off still says
        row["by_hand"] = _all_by_hand(options, work, larger)
        rows.append(row | _compared(row))
        options.file.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    print(f"rows={len(rows)} worst={min(ratios, default=0.0):.3f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("model")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--caps", type=int, nargs="+", default=[0])
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--methods", nargs="*", default=_METHODS)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--lora")
    parser.add_argument("--load-in", choices=["4bit"])
    parser.add_argument("--backend", default="all")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--tune", default="")
    return parser.parse_args()


def _tuned(options: argparse.Namespace, work: Work) -> dict[str, Any]:
    """What the tune found."""
    name = (options.model, options.gpus, round(work.cap_gib or 0), options.lora or "all", options.load_in)
    folder = options.file.absolute().with_suffix("") / "-".join(str(word).replace("/", "-") for word in name)
    return tune(work, folder, None, "--backend", options.backend, *options.tune.split())


def _all_by_hand(options: argparse.Namespace, work: Work, larger: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    divisor = work.batch // work.gpus
    micro_batches = [each for each in options.micro_batches if divisor % each == 0]
    wanted = {"micro_batches": micro_batches, "seconds": options.seconds}
    for method in options.methods:
        for checkpointing in (each == "on" for each in options.checkpointing):
            known = _known(larger, work.cap_gib or 0, method, checkpointing)
            found = by_hand(work, method, checkpointing, _LONGEST, **wanted) if known is None else known
            print(json.dumps(found), flush=True)
            rows += found
    return rows


def _is_under_a_larger_limit(other: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether `other` is of the same workload as `row`, with more memory or without a limit."""
    limit = row["cap_gib"]
    return row.items() <= (other | {"cap_gib": limit}).items() and (other["cap_gib"] or math.inf) > (limit or math.inf)


def _known(larger: list[dict[str, Any]], cap: float, method: str, checkpointing: bool) -> list[dict[str, Any]] | None:
    """What rows under larger limits say of one method; None if they leave it open which micro-batches fit.

    One that stayed below `cap` (GiB) takes as long there, and tensors that need more do not fit. In between, the
    allocator's cache decides.
    """
    all_known = larger[-1]["by_hand"] if larger else []
    own = [each for each in all_known if (each["method"], each["checkpointing"]) == (method, checkpointing)]
    if not own:
        return None
    fits = [each for each in own if each.get("peak_device_gib", math.inf) <= cap]
    rest = own[len(fits) :]
    if not rest or "ended" in rest[0]:
        return own
    if rest[0]["peak_allocated_gib"] <= cap:
        return None
    return [*fits, {"method": method, "checkpointing": checkpointing, "ended": "out of memory"}]


def _compared(row: dict[str, Any]) -> dict[str, Any]:
    fits = [each for each in row["by_hand"] if "tokens_per_second" in each]
    fastest = max(fits, key=lambda each: float(each["tokens_per_second"]), default=None)
    answer = row["answer"].get("tokens_per_second")
    ratio = round(answer / fastest["tokens_per_second"], 4) if fastest and answer else None
    return {"fastest_by_hand": fastest, "ratio": ratio}


if __name__ == "__main__":
    main()
