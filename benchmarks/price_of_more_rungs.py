"""What the rungs beyond the documented ladder cost the search, and bring, on simulated machines.

    python benchmarks/price_of_more_rungs.py [--machines 60] [--first 0] [--jobs 2]

Each case of benchmarks/search.py is tuned three times: on the documented ladder, with what lies beyond it, and with
Liger's kernels too where they know the model. The last line: `cases`; `seconds_beyond` and `seconds_with_liger`, the
trial seconds of all tunes over those of the documented ladder's; `gain_beyond` and `gain_with_liger`, the mean ratio of
tokens/s of the answers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from search_cases import Case, search, simulated_cases

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.search.policy import auto
from ladder.search.space import ranking
from ladder.techniques.registry import TECHNIQUES


@dataclass(frozen=True)
class Tune:
    """What one tune took and found."""

    seconds: float
    tokens_per_second: float


def tuned(case: Case, *, beyond: bool, liger: bool) -> Tune:
    """One of the three tunes of `case`."""
    history = search(case, case.space(beyond=beyond, liger=liger), auto)
    best = next(iter(ranking(history.records)), None)
    return Tune(history.search_seconds(), (best.tokens_per_second or 0.0) if best else 0.0)


def run_machine(cases: Sequence[Case]) -> list[tuple[Tune, Tune, Tune]]:
    """All accumulations of one machine."""
    return [
        (
            tuned(case, beyond=False, liger=False),
            tuned(case, beyond=True, liger=False),
            tuned(case, beyond=True, liger=any(TECHNIQUES["liger"].gets_into(rung, case.space()) for rung in RUNGS)),
        )
        for case in cases
    ]


def last_line(found: Sequence[tuple[Tune, Tune, Tune]]) -> str:
    """The figures of all cases; those in which nothing fits have no gain."""
    seconds = [sum(tunes[which].seconds for tunes in found) for which in range(3)]
    answered = [tunes for tunes in found if tunes[0].tokens_per_second]
    gains = [
        statistics.fmean(tunes[which].tokens_per_second / tunes[0].tokens_per_second for tunes in answered)
        for which in range(3)
    ]
    figures = {
        "cases": len(found),
        "seconds_beyond": round(seconds[1] / seconds[0], 2),
        "seconds_with_liger": round(seconds[2] / seconds[0], 2),
        "gain_beyond": round(gains[1], 3),
        "gain_with_liger": round(gains[2], 3),
    }
    return " ".join(f"{name}={value}" for name, value in figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with multiprocessing.Pool(options.jobs) as pool:
        found = pool.map(run_machine, list(simulated_cases(options.machines, first=options.first)), chunksize=1)
    print(last_line([tunes for machine in found for tunes in machine]))


if __name__ == "__main__":
    main()
