"""Are speeds at more GPUs predicted well from fewer? And what does a tune of 1,024 GPUs cost? On machines on paper.

    python benchmarks/scale.py [--quick]
    python benchmarks/scale.py --runs FOLDER FOLDER …

Each point from 2 to 64 GPUs is predicted as `ladder scale` does, with what the simulated tune of half as many GPUs
taught, and then tuned itself. A line names both speeds and whether the tuned one lies in the predicted range, which
should hold for 80 % of them. Then a 70B
model is tuned on 128 nodes of eight A100 of 80 GB: the line names the trials, their GPU-hours with the proof, and the
regret: measured speeds, with their noise, against the fastest candidate of an exhaustive tune. A second line is for
the same nodes with `surprise: 0`, where no rung is faster or slower than its work by a number drawn at random.
`--quick` leaves out the 70B model. The last line is a summary of the predictions.

With `--runs`, nothing is simulated: the folders are the run folders of real tunes of one workload on several numbers of
GPUs. Each number but the smallest is predicted with what the tune of the next smaller one taught. Of its own tune the
prediction knows what was tried, and neither a trial nor a measured speed of the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import yaml

from ladder.runs.stored_run import read_run
from ladder.search.forecast import plan
from ladder.search.space import fastest, ranking
from ladder.simulation.paper_machine import read_machine
from ladder.tuning.options import TuneOptions
from ladder.tuning.planning import expected_winner
from ladder.tuning.problem import problem_of
from ladder.tuning.run import TuneOutput, run_tune
from ladder.tuning.scaling import Run, like

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_MODELS = ("llama-2-7b", "llama-3.2-1b")
_MACHINES = ("a100-80", "h100-80", "a100-40")
_LARGE = Path(__file__).parent / "models" / "llama-2-70b.json"


def tuned(model: str, machine: str, count: int, folder: Path, strategy: str = "auto", batch: int = 128) -> TuneOutput:
    """A simulated tune."""
    place = folder / f"{Path(model).stem}-{Path(machine).stem}-{count}-{strategy}"
    place.mkdir()
    return run_tune(
        TuneOptions(
            model=model,
            gpus=count,
            global_batch_size=batch,
            launcher="simulated",
            machine=machine,
            strategy=strategy,  # type: ignore[arg-type]  # one of the names in TuneOptions
            run_dir=place / "run",
            output=place / "best_config.json",
        )
    )


def errors_of(name: str, runs: Sequence[Run]) -> list[tuple[float, bool]]:
    """Of each run but the smallest: the relative error of what is predicted, and whether its speed is in the range."""
    found = []
    for smaller, (space, records) in pairwise(sorted(runs, key=lambda run: run[0].world_size)):
        best = fastest(records)
        known = problem_of(space.workload, like(*smaller, space.world_size, space.world_size // space.num_nodes))
        expected = expected_winner(plan(replace(space, rates=known.rates, learned=known.learned, earlier=())))
        if best is None or not best.tokens_per_second or expected is None:
            continue
        seen, outlook = best.tokens_per_second, expected.outlook
        guess, low, high = outlook.tokens_per_second, outlook.pessimistic, outlook.optimistic
        print(
            f"{name} gpus={space.world_size} tuned={seen:.0f} predicted={guess:.0f} range={low:.0f}-{high:.0f} "
            f"error_pct={100 * (guess / seen - 1):+.1f} in_range={'yes' if low <= seen <= high else 'no'} "
            f"fastest={best.candidate_key!r} expected={outlook.candidate.key!r}",
            flush=True,
        )
        found.append((abs(guess / seen - 1), low <= seen <= high))
    return found


def simulated(model: str, machine: str, folder: Path) -> list[Run]:
    """The tunes of all numbers of GPUs."""
    results = [tuned(model, machine, count, folder).result for count in _COUNTS]
    return [(result.space, result.records) for result in results]


def stored(folders: Sequence[Path]) -> list[Run]:
    """Tunes that have run."""
    runs = [read_run(folder) for folder in folders]
    same = {(run.space.workload.fingerprint(), run.space.gpu_name, run.space.memory_limit) for run in runs}
    if len(same) > 1 or len({run.space.world_size for run in runs}) < len(runs):
        sys.exit("--runs: name tunes of one workload on the same GPUs, and of each number of GPUs one.")
    return [(run.space, run.records) for run in runs]


def large(folder: Path, machine: str) -> None:
    """The tune of a 70B model on 1,024 GPUs, against all candidates."""
    done, every = (tuned(str(_LARGE), machine, 1024, folder, name, 1024) for name in ("auto", "exhaustive"))
    best, found = fastest(every.result.records), fastest(done.result.records)
    hours = sum(sum(phases.values()) for phases in done.trial_seconds.values()) / 3600
    regret = 1 - (found.tokens_per_second or 0) / (best.tokens_per_second or 1) if found and best else 1.0
    print(
        f"llama-2-70b {Path(machine).stem} gpus=1024 trials={len(done.trial_seconds)} gpu_hours={1024 * hours:.1f} "
        f"fitting={len(ranking(every.result.records))} "
        f"found={found.candidate_key if found else ''!r} best={best.candidate_key if best else ''!r} "
        f"regret_pct={100 * regret:.2f}",
        flush=True,
    )


def without_surprise(name: str, folder: Path) -> str:
    """A file with that machine, whose rungs are as fast as their work says."""
    path = folder / f"{name}-plain.yaml"
    facts = read_machine(name).model_copy(update={"surprise": 0.0}).model_dump(mode="json")
    path.write_text(yaml.safe_dump(facts), encoding="utf-8")
    return str(path)


def summarise(found: Sequence[tuple[float, bool]]) -> None:
    if not found:
        sys.exit("There is nothing to compare: no number was both predicted and tuned.")
    sizes = [100 * error for error, _ in found]
    inside = 100 * sum(is_in for _, is_in in found) / len(found)
    print(
        f"points={len(found)} mean_pct={sum(sizes) / len(sizes):.1f} worst_pct={max(sizes):.1f} "
        f"in_range_pct={inside:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the 70B model")
    parser.add_argument("--runs", nargs="+", type=Path, metavar="FOLDER", help="compare tunes that have run")
    asked = parser.parse_args()
    if asked.runs:
        summarise(errors_of("stored", stored(asked.runs)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = []
        for model, machine in product(_MODELS, _MACHINES):
            found += errors_of(f"{model} {machine}", simulated(model, machine, folder))
        if not asked.quick:
            for machine in ("a100-80", without_surprise("a100-80", folder)):
                large(folder, machine)
    summarise(found)


if __name__ == "__main__":
    main()
