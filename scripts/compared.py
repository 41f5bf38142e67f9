"""Write the tables of docs/explanation/side-by-side.md and beside the live records: `python scripts/compared.py`.

It also draws the page's picture.

All figures come from benchmarks/results/compare: `ways.json` of benchmarks/choosers.py, `memory.json` of
benchmarks/estimators.py, and the files that benchmarks/compare.py has written on GPUs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import chart
import compared_chart
from compared_chart import run_of

RESULTS = chart.RESULTS / "compare"
PAGE = chart.ROOT / "docs" / "explanation" / "side-by-side.md"
RUNS = RESULTS / "README.md"
"""All live runs, beside their records."""

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
LIVE = {
    "opt-125m": "opt-125m, 512 tokens, batch 64",
    "roberta-base": "RoBERTa-base (masked-lm), 512 tokens, batch 64",
    "llama-1b-24gib-32": "Llama-3.2-1B, 24 GiB, batch 32",
    "llama-1b-24gib-256": "Llama-3.2-1B, 24 GiB, batch 256",
    "llama-1b-32": "Llama-3.2-1B, batch 32",
    "llama-1b-lora-24gib-32": "Llama-3.2-1B with LoRA, 24 GiB, batch 32",
    "opt-125m-2": "opt-125m on two GPUs, 512 tokens, batch 64",
    "opt-1.3b-2": "OPT-1.3B on two GPUs, batch 64",
    "llama-2-7b-76gib-2": "Llama-2-7B on two GPUs, 76 GiB, batch 64",
    "llama-2-7b-40gib-2": "Llama-2-7B on two GPUs, 40 GiB, batch 64",
    "llama-2-7b-40gib-4": "Llama-2-7B on four GPUs, 40 GiB, batch 128",
    "sft": "TRL's own SFT of Llama-3.2-1B, texts of uneven lengths, batch 32",
    "sft-lora": "TRL's own SFT of Llama-3.2-1B with LoRA, texts of uneven lengths, batch 32",
}
"""By row of benchmarks/compare.py, what stands in the table."""
LIVE_WAYS = {
    "ladder": "`ladder tune`",
    "ladder unchecked": "`ladder tune --allow unchecked-gradients`",
    "ddp": "DDP by hand",
    "fsdp2": "FSDP2 by hand",
    "trainer": "the Trainer by hand",
    "auto_find_batch_size": "the Trainer's `auto_find_batch_size`",
    "find_executable_batch_size": "accelerate's `find_executable_batch_size`",
    "lightning": "Lightning's batch-size finder",
    "autotuner fast": "DeepSpeed's Autotuner, fast",
    "autotuner full": "DeepSpeed's Autotuner, full",
}

UNCHECKED = ("opt-125m", "opt-125m-2", "roberta-base")
"""Rows in which a step is so short that DeepSpeed's check of gradients counts."""


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


def live_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each way, under its training and kind of GPU; speeds are compared with `ladder`'s on the same GPUs."""
    columns = ("training", "way", "answer", "tokens/s", "of `ladder`'s", "GPU seconds", "failures", "steps", "free")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    ours = {run_of(row): row["tokens_per_second"] for row in rows if row["way"] == "ladder"}
    for training, name in LIVE.items():
        of_training = [row for row in rows if row["row"] == training]
        for gpu in dict.fromkeys(map(gpu_of, of_training)):
            title = f"{name}; {gpu}"
            for way, shown in LIVE_WAYS.items():
                if own := [row for row in of_training if (row["way"], gpu_of(row)) == (way, gpu)]:
                    lines.append(f"| {' | '.join((title, shown, *_cells(own, ours)))} |")
                    title = ""
    return "\n".join(lines) + "\n"


def gpu_of(row: dict[str, Any]) -> str:
    """The model of a record's GPU: H200 of `2 x NVIDIA H200 (GPU-fb6f9293)`."""
    return str(row["host"]).partition("NVIDIA ")[2].split()[0]


def _cells(rows: Sequence[dict[str, Any]], ours: Mapping[tuple[str, int], float]) -> tuple[str, ...]:
    """What a way did in one training, over its repetitions."""
    ran = [row for row in rows if row["tokens_per_second"]]
    shares = [row["tokens_per_second"] / ours[run_of(row)] for row in ran if run_of(row) in ours]
    free = [max(0.0, row["headroom"]) for row in rows if row["headroom"] is not None]
    speeds = [_span([row["tokens_per_second"] for row in ran], ","), *map(_why, rows)]
    return (
        " or ".join(dict.fromkeys(shown for row in rows if (shown := _answer(row)))),
        "; ".join(filter(None, dict.fromkeys(speeds))),
        _span(shares, ".2f"),
        _span([row["gpu_seconds"] for row in rows]),
        _span([row["failures"] for row in rows if row["failures"] is not None]),
        _span([row["steps"] for row in rows]),
        _span(free, ".0%"),
    )


def _span(values: Sequence[float], form: str = "") -> str:
    """The value, or the least and the most of several; nothing of none."""
    whole = [value if "." in form else round(value) for value in values]
    ends = dict.fromkeys(format(value, form) for value in (min(whole), max(whole))) if whole else ()
    return " to ".join(ends)


def _answer(row: dict[str, Any]) -> str:
    """The engine, checkpointing if there is some, and the micro-batch, which the training itself may have shrunk."""
    answer = row["answer"]
    if answer is None:
        return ""
    engine = answer.get("engine") or answer.get("method")
    shown = [f"`{engine}`"] if engine not in (None, row["way"]) else []
    shown += [f"stage {answer['stage']}"] if "stage" in answer else []
    every = answer.get("checkpoint_every", 1 if answer.get("checkpointing") else 0)
    shown += ["checkpointing" if every == 1 else f"1/{every} checkpointing"] if every else []
    trained = answer.get("trained_micro_batch", answer["micro_batch"])
    shown += [str(answer["micro_batch"])] + [f"trained with {trained}"] * (trained != answer["micro_batch"])
    return ", ".join(shown + ["cut off"] * (row.get("finished") is False))


def live_gaps(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each training in which a way has no record."""
    had = {training: {row["way"] for row in rows if row["row"] == training} for training in LIVE}
    lines = []
    for training, name in LIVE.items():
        gone = [LIVE_WAYS[way] for way in ways_of(training) if way not in had[training]]
        if gone:
            lines.append(f"- {name}: {'; '.join(gone) if had[training] else 'everything'}")
    return "\n".join(lines) + "\n"


def ways_of(row: str) -> Collection[str]:
    """Nobody can put the others into a program without changing it; unchecked gradients are for small models."""
    if row.startswith("sft"):
        return "ladder", "trainer", "auto_find_batch_size"
    return [way for way in LIVE_WAYS if way != "ladder unchecked" or row in UNCHECKED]


def _why(row: dict[str, Any]) -> str:
    """Why there is no speed, in a cell of the table; nothing if there is one."""
    if row["tokens_per_second"]:
        return ""
    last = (row["why"] or "").strip().splitlines()[-1:]
    return ": ".join(["its training failed" if row["answer"] else "no answer", *last]).replace("|", "/")


def stored_rows(name: str) -> list[dict[str, Any]]:
    """What a file of the results holds; nothing before it is there."""
    file = RESULTS / f"{name}.json"
    return list(json.loads(file.read_text("utf-8"))) if file.exists() else []


def tables() -> dict[Path, dict[str, str]]:
    """By file, and by the name in its markers."""
    live = live_rows()
    return {
        PAGE: {"ways": ways_table(stored_rows("ways")), "memory": memory_table(stored_rows("memory"))},
        RUNS: {"live": live_table(live), "gaps": live_gaps(live)},
    }


def with_tables(page: str, written: Mapping[str, str]) -> str:
    """The page with the tables `written` between their markers. ValueError if a marker is missing."""
    for name, table in written.items():
        begin, end = f"<!-- {name}: written by scripts/compared.py -->\n", f"<!-- end of {name} -->\n"
        page = chart.between(page, begin, table, end, f"a page lacks the markers of {name}")
    return page


def live_rows() -> list[dict[str, Any]]:
    """All records of GPUs, each with its `row`."""
    return [{"row": row, **record} for row in LIVE for record in stored_rows(row)]


def main() -> None:
    for page, written in tables().items():
        page.write_text(with_tables(page.read_text("utf-8"), written), "utf-8")
    compared_chart.CHART.write_text(compared_chart.picture(live_rows(), LIVE), "utf-8")
    print(f"Wrote the tables of {PAGE} and {RUNS}, and {compared_chart.CHART}")


if __name__ == "__main__":
    main()
