"""A step as it is described (ladder/step) against what was recorded on real GPUs: the error before any trial.

    python benchmarks/physics.py [--adapters] [--rows NAME]

Every candidate of the recorded sweeps that fitted (benchmarks/results/sweeps), and the points of a Llama-2-7B shape
with 2 to 32 layers (tests/data). Predicted from data sheets, as the search does before its first trial; nothing is
learnt from the recordings while it runs. A simulated machine without surprises is as far off.

- memory: allocated bytes of the fullest moment over those recorded, less one: mean absolute, mean, and the worst;
- host: resident memory of all ranks likewise, mean absolute (measured points hold one rank's);
- step: seconds of an accumulating and of a boundary micro-step over those recorded: geometric mean, and scatter as the
  standard deviation of logarithms.

`--adapters` takes the recorded sweeps of LoRA and QLoRA in their place (benchmarks/results/1xh200-adapters). Two of
them, llama-r16-4bit and qwen3-r16-4bit, were recorded while a quantised model held its tied head twice, which it no
longer does. So 2 bytes for each of the head's weights are taken off their memory here, 0.489 and 0.580 GiB; the files
keep what was recorded.

`--rows NAME` prints each candidate of the sources whose name holds NAME.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorded import SWEEPS, Sweep, recorded_sweeps

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Candidate, Engine
from ladder.machine.machine_speed import machine_speed
from ladder.search.memory import predict_memory
from ladder.search.speed import predict_speed
from ladder.units import GIB
from ladder.workload.shapes import with_layers
from ladder.workload.source import resolve_model
from ladder.workload.workload import Workload

ADAPTERS = Path(__file__).resolve().parent / "results" / "1xh200-adapters"
_HEAD_TWICE = ("llama-r16-4bit", "qwen3-r16-4bit")
"""Sweeps of `ADAPTERS` whose allocated memory has a tied head twice."""
_MEASURED = Path(__file__).resolve().parent.parent / "tests" / "data" / "measured-4xh200-llama2-7b.json"
_KNOBS_OF_MEASURED = SWEEPS / "llama-2-7b-4xh200-allocator-40.json"
_CORES_OF_MEASURED = 64
_REUSE = {"stage3_max_reuse_distance": 1_000_000_000}
"""DeepSpeed's default, which the NVMe rung had then; it has none since."""
_GPU = "NVIDIA H200"
"""Of all recordings."""


@dataclass(frozen=True)
class Seen:
    """A candidate as it was recorded."""

    source: str
    workload: Workload
    candidate: Candidate
    ranks: int
    cores: int
    allocated: float
    """Bytes of the fullest rank."""
    host: float | None
    """Bytes of all ranks."""
    accumulate: float | None
    boundary: float


@dataclass(frozen=True)
class Errors:
    """What is predicted over what was recorded; logarithms of ratios for seconds."""

    seen: Seen
    memory: float
    host: float | None
    steps: tuple[float, ...]


def of_sweeps(folder: Path = SWEEPS) -> Iterator[Seen]:
    """Of each sweep's candidates those that fitted."""
    known = set()
    for sweep in recorded_sweeps((1,), folder=folder):
        name = sweep.name.split(",")[0]
        if name not in known:
            known.add(name)
            yield from (of_sweep(name, sweep, key, row) for key, row in sweep.rows.items() if row["outcome"] == "fits")


def recorded() -> Iterator[Seen]:
    """The candidates of sweeps that train all weights, and the measured points."""
    yield from of_sweeps()
    yield from of_points(json.loads(_MEASURED.read_text()), json.loads(_KNOBS_OF_MEASURED.read_text())["knobs"])


def of_sweep(name: str, sweep: Sweep, key: str, row: Mapping[str, Any]) -> Seen:
    model = sweep.workload.model
    too_much = 2.0 * model.vocab_size * model.hidden_size if name in _HEAD_TWICE else 0.0
    return Seen(
        source=name,
        workload=sweep.workload,
        candidate=sweep.space().by_key[key],
        ranks=sweep.machine.world_size,
        cores=sweep.machine.num_cores,
        allocated=row["peak_allocated_gib"] * GIB - too_much,
        host=row["host_gib"] * GIB if row.get("host_gib") else None,
        accumulate=row["accumulate_seconds"],
        boundary=row["boundary_seconds"],
    )


def of_points(facts: Mapping[str, Any], knobs: Mapping[str, Mapping[str, int]]) -> Iterator[Seen]:
    whole = resolve_model("llama-2-7b")
    devices = {
        (rung.stage, rung.offload_optimizer, rung.offload_param): rung
        for rung in reversed(list(RUNGS_BY_NAME.values()))
    }
    for values in facts["points"]:
        point = dict(zip(facts["columns"], values, strict=True))
        rung = devices[point["zero_stage"], point["offload_optimizer"], point["offload_param"]]
        if point["boundary_seconds"] is None:
            continue
        size, layers = point["micro_batch"], point["num_layers"]
        # All rungs had the buckets of 5e8 elements that are written down for those with all their layers.
        turned = knobs.get(rung.name, {**knobs["zero3"], **(_REUSE if "nvme" in rung.devices else {})})
        yield Seen(
            source=f"measured, {layers} layers",
            workload=Workload(
                model=with_layers(whole, layers), task="causal-lm", seq_len=2048, global_batch_size=8 * size
            ),
            candidate=Candidate(
                Engine(rung, tuple(sorted(turned.items()))), int(point["gradient_checkpointing"]), size, 2
            ),
            ranks=4,
            cores=_CORES_OF_MEASURED,
            allocated=point["peak_allocated_gib"] * GIB,
            host=None,  # one rank's, without what it shares
            # Those on NVMe kept parameters in the host's memory (max_in_cpu), which the emitted configuration does not.
            accumulate=None if "nvme" in rung.devices else point["accumulate_seconds"],
            boundary=point["boundary_seconds"],
        )


def errors_of(seen: Seen) -> Errors:
    memory = predict_memory(seen.workload, seen.candidate, world_size=seen.ranks, device="cuda")
    machine = machine_speed(_GPU, "cuda", seen.ranks, seen.cores)
    speed = predict_speed(seen.workload, seen.candidate, world_size=seen.ranks, machine=machine)
    times = ((speed.accumulate_seconds, seen.accumulate), (speed.boundary_seconds, seen.boundary))
    return Errors(
        seen=seen,
        memory=max(memory.moments.values()) / seen.allocated - 1,
        host=memory.host / seen.host - 1 if seen.host else None,
        steps=tuple(math.log(said / real) for said, real in times if real),
    )


def line(name: str, errors: Sequence[Errors]) -> str:
    memory, host = [error.memory for error in errors], [abs(error.host) for error in errors if error.host is not None]
    on_host = f"{statistics.mean(host):5.1%}" if host else "     "
    return (
        f"{name:44} {len(errors):4d}  {mean_size(memory):5.1%} {statistics.mean(memory):+6.1%} "
        f"{max(memory, key=abs):+6.1%}  {on_host}  {ratios([step for error in errors for step in error.steps])}"
    )


def mean_size(values: Sequence[float]) -> float:
    return statistics.mean(abs(value) for value in values)


def ratios(logarithms: Sequence[float]) -> str:
    return f"{math.exp(statistics.mean(logarithms)):4.2f} ± {statistics.pstdev(logarithms):4.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="print each candidate of the sources with this in their name")
    parser.add_argument("--adapters", action="store_true", help="the sweeps of LoRA and QLoRA")
    options = parser.parse_args()
    errors = [errors_of(seen) for seen in (of_sweeps(ADAPTERS) if options.adapters else recorded())]
    print(f"{'':44}       memory               host   step")
    print(f"{'':44} rows   mean   bias  worst   mean   ratio")
    for source in dict.fromkeys(error.seen.source for error in errors):
        own = [error for error in errors if error.seen.source == source]
        print(line(source, own))
        for rung in dict.fromkeys(error.seen.candidate.engine.rung.name for error in own):
            print(line(f"  {rung}", [error for error in own if error.seen.candidate.engine.rung.name == rung]))
        if options.rows and options.rows in source:
            for error in own:
                print(line(f"    {error.seen.candidate.engine.rung.name} {error.seen.candidate.variant}", [error]))
    print(line("all", errors))


if __name__ == "__main__":
    main()
