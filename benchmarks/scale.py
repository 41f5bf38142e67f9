"""Are speeds at more GPUs predicted well from fewer? And what does a tune of 1,024 GPUs cost? On machines on paper.

    python benchmarks/scale.py [--quick]
    python benchmarks/scale.py --runs FOLDER FOLDER …

Each point from 2 to 64 GPUs is predicted from the simulated tunes of all smaller numbers, and then tuned itself. A line
names both speeds and whether the tuned one lies in the predicted range, which should hold for 80 % of them. Then a 70B
model is tuned on 128 nodes of eight A100 of 80 GB: the line names the trials, their GPU-hours with the proof, and the
regret: measured speeds, with their noise, against the fastest candidate of an exhaustive tune. A second line is for
the same nodes with `surprise: 0`, where no rung is faster or slower than its work by a number drawn at random.
`--quick` leaves out the 70B model. The last line is a summary of the predictions.

With `--runs`, nothing is simulated: the folders are the run folders of real tunes of one workload on several numbers of
GPUs (or CPU ranks). Each number but the smallest is predicted from the tunes of all smaller ones. Of its own tune the
prediction knows what was tried, and neither a trial nor a measured speed of the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from ladder.events.outcome import Record
from ladder.machine.described import Machine
from ladder.runs.stored_run import read_run
from ladder.search.space import Space, fastest, ranking
from ladder.simulation.paper_machine import read_machine
from ladder.tuning.options import TuneOptions
from ladder.tuning.run import TuneOutput, run_tune
from ladder.tuning.scale_options import ScaleOptions
from ladder.tuning.scaling import Run, predicted, space_of

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


def errors_of(model: str, machine: str, folder: Path) -> list[tuple[float, bool]]:
    """Of each predicted point: the relative error, and whether the tuned speed lies in the range."""
    runs: dict[int, Run] = {}
    found = []
    for count in _COUNTS:
        result = tuned(model, machine, count, folder).result
        space = space_of(ScaleOptions(), result.space.workload, _machine(machine, count))
        found += compared(f"{model} {machine}", space, result.records, runs)
        runs[count] = (result.space, result.records)
    return found


def errors_of_stored(folders: Sequence[Path]) -> list[tuple[float, bool]]:
    """As `errors_of`, of tunes that have run."""
    stored = sorted((read_run(folder) for folder in folders), key=lambda run: run.space.world_size)
    first, runs, found = stored[0].space, dict[int, Run](), []
    for run in stored:
        space = run.space
        same = [(each.workload.fingerprint(), each.gpu_name, each.memory_limit) for each in (space, first)]
        if same[0] != same[1] or space.world_size in runs:
            sys.exit("--runs: name tunes of one workload on the same GPUs, and of each number of GPUs one.")
        if runs:
            smaller, _ = runs[max(runs)]
            known = replace(space, rates=smaller.rates, learned=smaller.learned)
            found += compared(f"{space.workload.model.name} {space.gpu_name or 'CPU'}", known, run.records, runs)
        runs[space.world_size] = (space, run.records)
    return found


def compared(
    name: str, space: Space, records: Sequence[Record], smaller: Mapping[int, Run]
) -> list[tuple[float, bool]]:
    """What `smaller` runs predict for `space`, beside its own `records`; nothing where one of both is missing."""
    best = fastest(records)
    if not smaller or best is None or not best.tokens_per_second:
        return []
    point = predicted(space, smaller)
    if not (point.tokens_per_second and point.low and point.high):
        return []
    seen, guess = best.tokens_per_second, point.tokens_per_second
    inside = point.low <= seen <= point.high
    print(
        f"{name} gpus={space.world_size} tuned={seen:.0f} predicted={guess:.0f} range={point.low:.0f}-{point.high:.0f} "
        f"error_pct={100 * (guess / seen - 1):+.1f} in_range={'yes' if inside else 'no'} "
        f"fastest={best.candidate_key!r} expected={point.candidate!r}",
        flush=True,
    )
    return [(abs(guess / seen - 1), inside)]


def _machine(name: str, count: int) -> Machine:
    return replace(read_machine(name).machine(count), nvme_path=None)


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
        summarise(errors_of_stored(asked.runs))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [each for model in _MODELS for machine in _MACHINES for each in errors_of(model, machine, folder)]
        if not asked.quick:
            for machine in ("a100-80", without_surprise("a100-80", folder)):
                large(folder, machine)
    summarise(found)


if __name__ == "__main__":
    main()
