"""How wrong are predictions before any trial? What stored runs measured, beside what ladder expects with no trial.

    python benchmarks/prior.py [RUN …]

Each RUN is a run folder; without one, all in benchmarks/results/runs are read. Every candidate that a trial measured
counts, but for those of users' own scripts. Its tokens/s are predicted from data sheets alone, or from what
`ladder doctor --measure` had measured before that run; from no trial, of this tune or an earlier one. Memory is the
most that tensors take at once, once the engine is there.

A table with a line for each kind of engine and each run: mean size of the error, its mean with sign, and the largest.
An error is predicted over measured, minus 1. Stage 0 without DeepSpeed is DDP, stages 2 and 3 are FSDP2 without and
with resharding. Candidates for which memory was so short that the allocator emptied its cache while they were timed
have a line of their own: how much slower that makes them is not predicted. The last line is
`candidates=… speed_mean_pct=… speed_worst_pct=… memory_mean_pct=… memory_worst_pct=… had_memory=…
had_memory_speed_mean_pct=…`, where the last two are without those candidates.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from physics import mean_size

from ladder.backends.registry import is_main
from ladder.candidates import Rung
from ladder.runs.stored_run import read_run
from ladder.search.belief import believe
from ladder.step.ledger import START

RUNS = Path(__file__).parent / "results" / "runs"


@dataclass(frozen=True)
class Error:
    """Predicted over measured, less 1, of one candidate."""

    run: str
    kind: str
    speed: float
    memory: float
    had_memory: bool
    """The allocator did not empty its cache."""


def errors_of(folder: Path) -> Iterator[Error]:
    """Of all that the run in `folder` measured with its own model."""
    run = read_run(folder)
    space = run.space
    if space.workload.script is not None:
        return
    belief = believe(replace(space, learned=(), earlier=()), ())
    for record in run.records:
        seen = record.measurement
        if record.purpose != "measure" or seen is None or not record.tokens_per_second:
            continue
        expected = belief.outlook(space.by_key[record.candidate_key])
        moments = expected.memory.moments
        yield Error(
            run=folder.name,
            kind=kind_of(expected.candidate.engine.rung),
            speed=expected.speed.tokens_per_second / record.tokens_per_second - 1,
            memory=max(need for name, need in moments.items() if name != START) / seen.peak_allocated - 1,
            had_memory=not seen.alloc_retries,
        )


def kind_of(rung: Rung) -> str:
    """Rungs of one kind have much of their prediction in common."""
    return f"stage {rung.stage}{'' if is_main(rung) else ', no DeepSpeed'}{', offload' if rung.devices else ''}"


def line(name: str, errors: Sequence[Error]) -> str:
    speed, memory = [error.speed for error in errors], [error.memory for error in errors]
    return f"{name:36} {len(errors):4d}   {figures(speed)}   {figures(memory)}"


def figures(values: Sequence[float]) -> str:
    return f"{mean_size(values):6.1%} {statistics.mean(values):+7.1%} {max(values, key=abs):+8.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    folders = parser.parse_args().runs or sorted(path.parent for path in RUNS.glob("*/journal.log"))
    errors = [error for folder in folders for error in errors_of(folder)]
    print(f"{'':36}    n   tokens/s: mean, bias, worst   memory: mean, bias, worst")
    for kind in sorted({error.kind for error in errors}):
        print(line(kind, [error for error in errors if error.kind == kind]))
    for had_memory, name in ((True, "had memory to spare"), (False, "the allocator emptied its cache")):
        if of_one := [error for error in errors if error.had_memory is had_memory]:
            print(line(name, of_one))
    for run in dict.fromkeys(error.run for error in errors):
        print(line(run, [error for error in errors if error.run == run]))
    speed, memory = [error.speed for error in errors], [error.memory for error in errors]
    steady = [error.speed for error in errors if error.had_memory]
    print(
        f"candidates={len(errors)} speed_mean_pct={100 * mean_size(speed):.1f} "
        f"speed_worst_pct={100 * max(speed, key=abs):.1f} memory_mean_pct={100 * mean_size(memory):.1f} "
        f"memory_worst_pct={100 * max(memory, key=abs):.1f} "
        f"had_memory={len(steady)} had_memory_speed_mean_pct={100 * mean_size(steady):.1f}"
    )


if __name__ == "__main__":
    main()
