"""Write the tables of docs/explanation/side-by-side.md: `python scripts/compared.py`.

All figures come from benchmarks/results/compare: `ways.json` of benchmarks/choosers.py and `memory.json` of
benchmarks/estimators.py.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import chart

RESULTS = chart.RESULTS / "compare"
PAGE = chart.ROOT / "docs" / "explanation" / "side-by-side.md"

WAYS = {
    "ladder": "`ladder tune`",
    "first fit": "the documented recipe",
    "first fit, larger": "the same, then larger micro-batches",
    "z0": "a file for ZeRO-0",
    "z2": "a file for ZeRO-2",
    "z2-offload": "a file for ZeRO-2 with offload",
    "z3": "a file for ZeRO-3",
    "z3-offload": "a file for ZeRO-3 with offload",
    "best file": "all five files, and the fastest kept",
    "hpc": "stage 3, both offloads, micro-batch 1",
    "TPE": "Optuna's TPE sampler",
    "random": "random search",
    "sweep": "exhaustive search",
}
"""By the name in `ways.json`, what stands in the table."""
ESTIMATORS = {
    "ladder": "`ladder plan`",
    "deepspeed": "DeepSpeed's estimators",
    "accelerate": "`accelerate estimate-memory`",
    "llm-analysis": "llm-analysis",
}


def ways_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each way over all whole sweeps."""
    whole = [row for row in rows if row["whole"]]
    ladder = {row["sweep"]: row["gpu_seconds"] for row in whole if row["way"] == "ladder"}
    lines = [
        "| way | speed, mean | speed, worst | no answer | cost in GPU time | failed trials, mean |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, name in WAYS.items():
        own = [row for row in whole if row["way"] == way]
        found = [row["share"] for row in own if row["share"]]
        spent = sum(row["gpu_seconds"] for row in own) / sum(ladder.values())
        failures = statistics.mean(row["failures"] for row in own)
        lines.append(
            f"| {name} | {statistics.mean(found):.2%} | {min(found):.1%} | {len(own) - len(found)} of {len(own)} "
            f"| {spent:.1f} | {failures:.1f} |"
        )
    return "\n".join(lines) + "\n"


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each family and estimator that says something about it."""
    lines = [
        "| trained | family | estimator | candidates | error, mean | worst | `ladder plan` on the same, mean | worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["spoken_of"]:
            lines.append(
                f"| {row['training']} | {row['family']} | {ESTIMATORS[row['estimator']]} "
                f"| {row['spoken_of']} of {row['recorded']} | {row['mean_error']:.1%} | {row['worst_error']:+.1%} "
                f"| {row['ladder_mean_error']:.1%} | {row['ladder_worst_error']:+.1%} |"
            )
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """The page with both tables between their markers. ValueError if a marker is missing."""
    for name, table in (("ways", ways_table), ("memory", memory_table)):
        rows = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        begin, end = f"<!-- {name}: written by scripts/compared.py -->\n", f"<!-- end of {name} -->\n"
        page = chart.between(page, begin, table(rows), end, f"{PAGE} lacks the markers of {name}")
    return page


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
    print(f"Wrote the tables of {PAGE}")


if __name__ == "__main__":
    main()
