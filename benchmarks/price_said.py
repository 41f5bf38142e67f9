"""Is the price that a tune says first what it then costs? Stored tunes, priced again from what was known before them.

    python benchmarks/price_said.py [RUN …]

Each RUN is a run folder; without one, those of `_TUNES` in benchmarks/results/runs are read: tunes of all rungs without
a time budget. A line for each: the seconds and trials that are said, and those that its trials took. The last line is
`tunes=… within_1.5=… median_taken_over_said=…`.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path

from prior import RUNS

from ladder.runs.stored_run import read_run
from ladder.search.auto import auto
from ladder.search.rehearsal import price

_TUNES = ("llama-*", "opt-*", "mixture-of-experts-*")
_FACTOR = 1.5
_COMPARISONS = 2
"""Of losses before a proof, as in most of these tunes."""


def main() -> None:
    folders = [Path(each) for each in sys.argv[1:]] or sorted(each for name in _TUNES for each in RUNS.glob(name))
    ratios = []
    for folder in folders:
        run = read_run(folder)
        said = price(replace(run.space, learned=(), earlier=()), auto, comparisons=_COMPARISONS)
        took = sum(sum(phases.values()) for phases in run.trial_seconds.values())
        trials = {record.trial for record in run.records if record.purpose in ("measure", "probe")}
        if said is None:
            print(f"{folder.name:40} no price")
            continue
        ratios.append(took / said.seconds)
        print(
            f"{folder.name:40} said {said.seconds:4.0f} s, {said.trials:2} trials   "
            f"took {took:4.0f} s, {len(trials):2} trials   {ratios[-1]:.2f}"
        )
    near = sum(1 / _FACTOR <= ratio <= _FACTOR for ratio in ratios)
    print(f"tunes={len(ratios)} within_{_FACTOR}={near} median_taken_over_said={statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
