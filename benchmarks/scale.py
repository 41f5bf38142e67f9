"""Are speeds at more GPUs predicted well from fewer? And what does a tune of 1,024 GPUs cost? On machines on paper.

    python benchmarks/scale.py [--quick]

Each point from 2 to 64 GPUs is predicted from the simulated tunes of all smaller numbers, and then tuned itself. A line
names both speeds and whether the tuned one lies in the predicted range, which should hold for 80 % of them. Then a 70B
model is tuned on 128 nodes of eight A100 of 80 GB: the line names the trials, their GPU-hours with the proof, and the
regret: measured speeds, with their noise, against the fastest candidate of an exhaustive tune. A second line is for
the same nodes with `surprise: 0`, where no rung is faster or slower than its work by a number drawn at random.
`--quick` leaves out the 70B model. The last line is a summary of the predictions.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from ladder.machine.described import Machine
from ladder.search.space import fastest, ranking
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
        best = fastest(result.records)
        if runs and best is not None and best.tokens_per_second:
            point = predicted(space_of(ScaleOptions(), result.space.workload, _machine(machine, count)), runs)
            if point.tokens_per_second and point.low and point.high:
                seen, guess = best.tokens_per_second, point.tokens_per_second
                inside = point.low <= seen <= point.high
                found.append((abs(guess / seen - 1), inside))
                print(
                    f"{model} {machine} gpus={count} tuned={seen:.0f} predicted={guess:.0f} "
                    f"error_pct={100 * (guess / seen - 1):+.1f} in_range={'yes' if inside else 'no'}",
                    flush=True,
                )
        runs[count] = (result.space, result.records)
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the 70B model")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [each for model in _MODELS for machine in _MACHINES for each in errors_of(model, machine, folder)]
        if not asked.quick:
            for machine in ("a100-80", without_surprise("a100-80", folder)):
                large(folder, machine)
    sizes = [100 * error for error, _ in found]
    inside = 100 * sum(is_in for _, is_in in found) / len(found)
    print(
        f"points={len(found)} mean_pct={sum(sizes) / len(sizes):.1f} worst_pct={max(sizes):.1f} "
        f"in_range_pct={inside:.0f}"
    )


if __name__ == "__main__":
    main()
