"""The ways in which people choose a configuration, each over the same recorded sweeps of real GPUs.

    python benchmarks/choosers.py FILE.json [--accumulations 1 4 32] [--sweeps llama-3.2-1b-1xh200 …] [--every-cap]

A sweep knows what every candidate did (`recorded.py`), so each way gets the same machine, the same candidates and the
same seconds for the same trial, as if all had been run side by side.

- `ladder`: the default search;
- `first fit`: the documented ladder by hand, at micro-batch 1, until something fits;
- `first fit, larger`: the same, then the largest micro-batch that fits there, doubling;
- `z0`, `z2`, `z2-offload`, `z3`, `z3-offload`: the files that training frameworks ship, with gradient checkpointing, as
  those have it, each at its largest micro-batch that fits, doubling; `best file` is all five in turn;
- `hpc`: stage 3 with both offloads and micro-batch 1, as computing centres write it down;
- `TPE`, `random`: samplers of Optuna over all candidates, a trial each, stopped as soon as they are as good as ladder
  or within 2 % of the fastest: kinder than real life, where nobody tells them. Figures are means of ten seeds;
- `sweep`: every candidate.

Seconds are those of trials without the proof, which all owe alike. FILE.json gets a row for each sweep, limit of
memory, accumulation and way: the share of the fastest candidate's speed, trials, seconds, GPU-seconds, trials that
failed, and the part of the limit that the answer leaves free. A sweep that it already holds is not played again. The
last line is the least share of ladder's answers over the best other answer (`worst`; the sweep and the samplers, which
see the truth, are left out), and how many rows there are.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import optuna
from recorded import Sweep, recorded_sweeps
from search import GOOD_ENOUGH, asking, regret_of, samplers
from search_cases import search

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.search.decisions import Measure, Stop, Strategy
from ladder.search.policy import STRATEGIES
from ladder.search.space import Space, measured, ranking

FILES = {
    "z0": "zero0",
    "z2": "zero2",
    "z2-offload": "zero2+opt-cpu",
    "z3": "zero3",
    "z3-offload": "zero3+param-cpu+opt-cpu",
}
"""By the name of a file that frameworks ship, its rung."""
SAMPLERS = ("TPE", "random")
_AVERAGED = ("share", "trials", "seconds", "gpu_seconds", "failures")
_SEEDS = range(10)
"""Chosen: one seed finds the fastest in its first trial, another in its last."""


def larger(space: Space, start: Candidate) -> list[Candidate]:
    """`start`, then the same with twice the micro-batch, and so on."""
    alike = (each for each in space.of_engine(start.engine) if each.checkpointing == start.checkpointing)
    return sorted(alike, key=lambda each: each.micro_batch)[space.micro_batches.index(start.micro_batch) :]


def next_of(steps: Iterable[Candidate], records: Sequence[Record]) -> Candidate | None:
    """The first of `steps` that is not measured; None if all are, or one of those before it failed."""
    tried = measured(records)
    for step in steps:
        if step.key not in tried:
            return step
        if tried[step.key].outcome.kind != "fits":
            return None
    return None


def one_by_one(steps: Callable[[Space, Sequence[Record]], Candidate | None]) -> Strategy:
    """A trial for each candidate that `steps` names, until it names none."""

    def strategy(space: Space, records: Sequence[Record]) -> Measure | Stop:
        candidate = steps(space, records)
        return Stop("done") if candidate is None else Measure(candidate.engine, (candidate,), "by hand")

    return strategy


def of_files(*files: str) -> Strategy:
    """Each file at its smallest micro-batch, then larger ones."""

    def steps(space: Space, records: Sequence[Record]) -> Candidate | None:
        for file in files:
            start = start_of(space, FILES[file])
            found = next_of(larger(space, start), records) if start else None
            if found:
                return found
        return None

    return one_by_one(steps)


def start_of(space: Space, rung: str) -> Candidate | None:
    """The smallest micro-batch of a rung under gradient checkpointing; None where the sweep did not try it."""
    own = [each for each in space.candidates if each.engine.rung.name == rung and each.checkpointing == "on"]
    return min(own, key=lambda each: each.micro_batch, default=None)


def first_fit_larger(space: Space, records: Sequence[Record]) -> Candidate | None:
    """The documented ladder, then larger micro-batches where it ended."""
    decision = STRATEGIES["walk"](space, records)
    if isinstance(decision, Measure):
        return decision.candidates[0]
    fits = [key for key, record in measured(records).items() if record.outcome.kind == "fits"]
    return next_of(larger(space, space.by_key[fits[0]]), records) if fits else None


def fixed(space: Space, records: Sequence[Record]) -> Candidate | None:
    """Stage 3 with both offloads at the smallest micro-batch."""
    start = start_of(space, FILES["z3-offload"])
    return next_of([start], records) if start else None


WAYS: dict[str, Strategy] = {
    "first fit": STRATEGIES["walk"],
    "first fit, larger": one_by_one(first_fit_larger),
    **{file: of_files(file) for file in FILES},
    "best file": of_files(*FILES),
    "hpc": one_by_one(fixed),
    "sweep": STRATEGIES["exhaustive"],
}
"""By name, all but ladder and the samplers."""


def sampled(sweep: Sweep, enough: float, speeds: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each sampler, which stops within `enough` of the fastest."""
    rows = []
    for number, way in enumerate(SAMPLERS):
        own = [chosen(sweep, way, asking(samplers(seed)[number], speeds, enough), speeds) for seed in _SEEDS]
        means = {name: round(statistics.mean(row[name] for row in own), 4) for name in _AVERAGED}
        rows.append({**own[0], "answer": None, "headroom": None, **means})
    return rows


def chosen(sweep: Sweep, way: str, strategy: Strategy, speeds: dict[str, float]) -> dict[str, Any]:
    """One row."""
    space = sweep.space()
    history = search(sweep, space, strategy)
    best = next(iter(ranking(history.records)), None)
    tried = [record for record in history.records if record.purpose == "measure"]
    seconds = history.search_seconds()
    needed = sweep.needs(best.candidate_key) if best else None
    return {
        "sweep": sweep.name,
        "whole": sweep.is_whole,
        "gpus": sweep.machine.world_size,
        "way": way,
        "answer": best.candidate_key if best else None,
        "share": round(1 - regret_of(history, speeds), 4),
        "trials": len({record.trial for record in tried}),
        "seconds": round(seconds, 1),
        "gpu_seconds": round(seconds * sweep.machine.world_size, 1),
        "failures": sum(record.outcome.kind != "fits" for record in tried),
        "headroom": round(1 - needed / sweep.cap, 4) if needed else None,
    }


def of_sweep(sweep: Sweep) -> list[dict[str, Any]]:
    """All ways on one sweep; none where nothing fits."""
    speeds = sweep.speeds()
    if not speeds:
        return []
    own = chosen(sweep, "ladder", STRATEGIES["auto"], speeds)
    enough = max(1 - own["share"], GOOD_ENOUGH)
    by_hand = [chosen(sweep, way, strategy, speeds) for way, strategy in WAYS.items()]
    return [own, *by_hand, *sampled(sweep, enough, speeds)]


def worst(rows: Sequence[dict[str, Any]]) -> float:
    """Of ladder's answers, the least speed over the best of those that do not see the truth."""
    seeing = {"sweep", *SAMPLERS}
    ratios = []
    for own in (row for row in rows if row["way"] == "ladder"):
        others = [row["share"] for row in rows if row["sweep"] == own["sweep"] and row["way"] not in seeing]
        ratios.append(own["share"] / max(others))
    return min(ratios, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--sweeps", nargs="*", default=[], help="only files of these names")
    parser.add_argument("--every-cap", action="store_true")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows: list[dict[str, Any]] = json.loads(options.file.read_text()) if options.file.exists() else []
    known = {row["sweep"] for row in rows}
    for sweep in recorded_sweeps(tuple(options.accumulations), every_cap=options.every_cap):
        if sweep.name in known or (options.sweeps and sweep.name.split(",")[0] not in options.sweeps):
            continue
        own = of_sweep(sweep)
        rows += own
        options.file.write_text(json.dumps(rows, indent=1) + "\n")
        for row in own:
            print(json.dumps(row), flush=True)
    print(f"rows={len(rows)} worst={worst(rows):.3f}")


if __name__ == "__main__":
    main()
