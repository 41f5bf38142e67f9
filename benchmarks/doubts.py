"""How far off the search is about an engine once another one was measured, and how far off it thinks that it is.

    python benchmarks/doubts.py

In each whole recorded sweep (benchmarks/results/sweeps), at each number of accumulation steps, the speed model learns
from the two fastest candidates of one engine and predicts the fastest one of another. Engines that keep all on the GPU
are `gpu`, the others `offload`; `stages` says whether the two have the same stage, or one of them has stage 3.

- error: the root mean square of the logarithm of measured over predicted seconds;
- doubt: the standard deviation that the model gives, likewise;
- ratio: error over doubt, likewise; 1 if doubts are as large as errors;
- mean: of the ratios, above zero if predictions are too fast; worst: the largest without its sign.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import permutations

from recorded import Sweep, recorded_sweeps
from search_cases import ACCUMULATIONS

from ladder.candidates import Candidate, Engine
from ladder.machine.machine_speed import machine_speed
from ladder.search.speed import STEP_NOISE, SpeedObservation, calibrate_speed, predict_speed

_LEARNT = 2
"""Candidates of the engine that is known. Chosen: the search measures one to three in a trial."""


def surprises(sweep: Sweep) -> Iterator[tuple[tuple[str, str, str], float, float]]:
    """For each two engines: how they relate, the error and the doubt."""
    space, by_engine = sweep.space(), defaultdict[Engine, list[Candidate]](list)
    machine = machine_speed(space.gpu_name, "cuda", space.world_size, space.num_cores, 1)
    for candidate in space.candidates:
        if sweep.rows[candidate.key]["outcome"] == "fits":
            by_engine[candidate.engine].append(candidate)

    def seconds(candidate: Candidate) -> float:
        row = sweep.rows[candidate.key]
        return float((candidate.accumulation - 1) * (row["accumulate_seconds"] or 0.0) + row["boundary_seconds"])

    fastest = {engine: sorted(own, key=seconds) for engine, own in by_engine.items()}
    for known, other in permutations(fastest, 2):
        rows = [(candidate, sweep.rows[candidate.key]) for candidate in fastest[known][:_LEARNT]]
        seen = [
            SpeedObservation(
                candidate=candidate,
                boundary_seconds=row["boundary_seconds"],
                accumulate_seconds=row["accumulate_seconds"],
            )
            for candidate, row in rows
        ]
        learnt = calibrate_speed(sweep.workload, seen, world_size=space.world_size, machine=machine)
        wanted = fastest[other][0]
        said = predict_speed(sweep.workload, wanted, world_size=space.world_size, machine=machine, calibration=learnt)
        error = math.log(seconds(wanted) / said.step_seconds(wanted.accumulation))
        yield _relation(known, other), error, math.hypot(said.deviation, STEP_NOISE)


def _relation(known: Engine, other: Engine) -> tuple[str, str, str]:
    where = ["offload" if engine.rung.devices else "gpu" for engine in (known, other)]
    stages = {known.rung.stage, other.rung.stage}
    return where[0], where[1], "same" if len(stages) == 1 else "3 and less" if 3 in stages else "below 3"


def _rms(values: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(value * value for value in values))


def main() -> None:
    found = defaultdict(list)
    for sweep in recorded_sweeps(ACCUMULATIONS, every_cap=False):
        if sweep.is_whole:
            for relation, error, doubt in surprises(sweep):
                found[relation].append((error, doubt))
    print(f"{'known':8} {'predicted':10} {'stages':11} pairs  error  doubt  ratio   mean  worst")
    for (known, other, stages), pairs in sorted(found.items()):
        ratios = [error / doubt for error, doubt in pairs]
        print(
            f"{known:8} {other:10} {stages:11} {len(pairs):5d} {_rms(e for e, _ in pairs):6.3f} "
            f"{_rms(d for _, d in pairs):6.3f} {_rms(ratios):6.2f} {statistics.fmean(ratios):6.2f} "
            f"{max(map(abs, ratios)):6.2f}"
        )


if __name__ == "__main__":
    main()
