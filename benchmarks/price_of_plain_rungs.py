"""What rungs without DeepSpeed cost the search, and bring, on simulated machines or in recorded sweeps.

    python benchmarks/price_of_plain_rungs.py [--machines 60] [--first 0] [--jobs 2] [--adapters]
    python benchmarks/price_of_plain_rungs.py --recorded

Each case is tuned with DeepSpeed's rungs and, as `--backend all` does, with all: the cases of benchmarks/search.py, or
with `--recorded` those of the sweeps in benchmarks/results/sweeps/plain. Machines that train in fp16, where no plain
rung works, are left out, and so are cases where nothing fits.

The last line: `cases`; `plain_wins`, those whose fastest candidate has no DeepSpeed; `seconds`, the trial seconds of
all tunes over those with DeepSpeed's rungs alone; `gain`, the mean ratio of tokens/s of the answers; `p95_regret_pct`
and `max_regret_pct` over all rungs, and `deepspeed_p95_regret_pct` of DeepSpeed's answer among its own; and the mean
error of the memory of plain candidates that fit: `memory_mae_pct` as the tune leaves it, and `memory_before_pct` before
any trial, of allocated bytes on the same machines without deviations, or as recorded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recorded import SWEEPS, Sweep, recorded_sweeps
from search import percentile, regret_of
from search_cases import ACCUMULATIONS, Case, Problem, search, simulated_cases

from ladder.backends.registry import backend_of
from ladder.candidates import Candidate
from ladder.search.belief import believe
from ladder.search.policy import auto
from ladder.search.space import of_main_backend
from ladder.simulation.physics import Physics
from ladder.units import GIB


@dataclass(frozen=True)
class Found:
    """One case."""

    name: str
    plain_wins: bool
    seconds: float
    seconds_without: float
    gain: float
    regret: float
    own_regret: float
    after: tuple[float, ...]
    before: tuple[float, ...]


def run_machine(cases: Sequence[Problem]) -> list[Found]:
    """All accumulations of one machine."""
    found = [run_case(case) for case in cases]
    return [each for each in found if each is not None]


def run_case(case: Problem) -> Found | None:
    """None where nothing fits, or no plain rung works."""
    space, speeds = case.space(), case.speeds()
    own = of_main_backend(space)
    of_own = {key: speed for key, speed in speeds.items() if key in own.by_key and is_own(space.by_key[key])}
    if not of_own or own.engines == space.engines:
        return None
    without, history = search(case, own, auto), search(case, space, auto)
    belief, known = believe(space, history.records), case.device_bytes()
    plain = [space.by_key[key] for key in speeds if key not in of_own]
    regret, own_regret = regret_of(history, speeds), regret_of(without, of_own)
    return Found(
        name=case.name,
        plain_wins=max(speeds, key=lambda key: speeds[key]) not in of_own,
        seconds=history.search_seconds(),
        seconds_without=without.search_seconds(),
        gain=(1 - regret) * max(speeds.values()) / ((1 - own_regret) * max(of_own.values())),
        regret=regret,
        own_regret=own_regret,
        after=tuple(belief.outlook(each).memory.peak / known[each.key] - 1 for each in plain),
        before=tuple(error_before(case, each) for each in plain),
    )


def is_own(candidate: Candidate) -> bool:
    return candidate.engine.rung.backend == "deepspeed"


def error_before(case: Problem, candidate: Candidate) -> float:
    """Of the allocated bytes, before any trial."""
    moments = backend_of(candidate.engine.rung).moments(case.workload, candidate, case.machine.world_size, "cuda")
    return max(moment.total for moment in moments) / truly_allocated(case, candidate) - 1


def truly_allocated(case: Problem, candidate: Candidate) -> float:
    """Bytes as recorded, or on a machine without deviations."""
    if isinstance(case, Sweep):
        return float(case.rows[candidate.key]["peak_allocated_gib"] * GIB)
    assert isinstance(case, Case)
    exact = case.simulated.model_copy(update={"surprise": 0.0, "rank_spread": 0.0})
    return Physics(exact, case.workload, case.machine.world_size).truth(candidate).allocated


def last_line(found: Sequence[Found]) -> str:
    figures = {
        "cases": len(found),
        "plain_wins": sum(each.plain_wins for each in found),
        "seconds": round(sum(each.seconds for each in found) / sum(each.seconds_without for each in found), 3),
        "gain": round(statistics.fmean(each.gain for each in found), 3),
        "p95_regret_pct": round(100 * percentile([each.regret for each in found], 0.95), 2),
        "max_regret_pct": round(100 * max(each.regret for each in found), 2),
        "deepspeed_p95_regret_pct": round(100 * percentile([each.own_regret for each in found], 0.95), 2),
        "memory_mae_pct": mean_error([error for each in found for error in each.after]),
        "memory_before_pct": mean_error([error for each in found for error in each.before]),
    }
    return " ".join(f"{name}={value}" for name, value in figures.items())


def mean_error(errors: Sequence[float]) -> float:
    return round(100 * statistics.fmean(map(abs, errors)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--adapters", action="store_true", help="train by LoRA and QLoRA, where only DDP works")
    parser.add_argument("--recorded", action="store_true", help="play back recorded sweeps, and no machine")
    options = parser.parse_args()
    machines: Iterable[Sequence[Problem]]
    if options.recorded:
        machines = ([sweep] for sweep in recorded_sweeps(ACCUMULATIONS, folder=SWEEPS / "plain"))
    else:
        machines = simulated_cases(options.machines, first=options.first, adapters=options.adapters, plain=True)
    with multiprocessing.Pool(options.jobs) as pool:
        found = [each for machine in pool.imap(run_machine, list(machines)) for each in machine]
    for each in sorted(found, key=lambda each: -each.regret)[:8]:
        if each.regret > 0.01:
            print(f"regret {each.regret:.1%}: {each.name}")
    for each in sorted(found, key=lambda each: each.seconds_without - each.seconds)[:8]:
        print(f"{each.seconds:.0f} s instead of {each.seconds_without:.0f}: {each.name}")
    print(last_line(found))


if __name__ == "__main__":
    main()
