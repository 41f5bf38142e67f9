"""The search against the exhaustive sweep, Optuna's TPE and random search, on simulated machines and recorded sweeps.

    python benchmarks/search.py [--quick] [--machines 240] [--first 0] [--jobs 2] [--surprise 1] [--adapters]

Every strategy runs through the same tuner and the same simulated launcher; what a candidate really does there is drawn
from laws that the search does not see (ladder/simulation/physics.py). The proof of fit, which all strategies owe
alike, is not counted. TPE and random search are stopped as soon as they are as good as `auto` was or within 2 % of the
best, whichever comes first; a candidate that they ask for twice costs them nothing.

With `--adapters`, the simulated machines train by LoRA or QLoRA (ranks 8 to 256), and recorded sweeps, which train all
weights, are left out. With `--known`, each machine's own speeds were measured before, with 5 % of noise; recorded
machines' speeds are not known, so those sweeps are left out as well.

The last line:

- cases: machine, workload and accumulation;
- p95_regret_pct, max_regret_pct: 1 - true tokens/s of the answer over true tokens/s of the best candidate that fits;
- trial_seconds_ratio: trial seconds of `auto` over those of the sweep, summed over all cases;
- tpe_seconds_ratio, random_seconds_ratio: likewise against TPE and random search;
- memory_mae_pct: predicted peak against the true one, over all candidates that fit, after the last calibration;
- unsafe_pct: of the candidates said to fit, those that do not.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from recorded import recorded_sweeps
from search_cases import ACCUMULATIONS, MemoryHistory, Problem, search, simulated_cases

from ladder.candidates import HALF, Candidate
from ladder.events.outcome import Record
from ladder.search.belief import believe
from ladder.search.decisions import Measure, Stop, Strategy
from ladder.search.policy import STRATEGIES
from ladder.search.space import Space, measured, ranking

GOOD_ENOUGH = 0.02
_QUICK_SECONDS = 38.0
_MOST_REPEATS = 100


@dataclass(frozen=True)
class Result:
    """One case, every strategy."""

    name: str
    has_nvme: bool
    regret: float
    auto_seconds: float
    auto_trials: int
    restart_seconds: float
    sweep_seconds: float
    tpe_seconds: float
    random_seconds: float
    memory_errors: tuple[float, ...]
    num_said_to_fit: int
    num_unsafe: int
    decision_seconds: float


def run_case(case: Problem, seed: int) -> Result | None:
    """None where nothing fits."""
    space, known, speeds = case.space(), case.device_bytes(), case.speeds()
    if not speeds:
        return None
    began = time.process_time()
    history = search(case, space, STRATEGIES["auto"])
    thought = time.process_time() - began
    regret = regret_of(history, speeds)
    sweep = search(case, space, STRATEGIES["exhaustive"])
    enough = max(regret, GOOD_ENOUGH)
    others = [search(case, space, asking(sampler, speeds, enough)) for sampler in samplers(seed)]
    belief = believe(space, history.records)
    outlooks = {key: belief.outlook(space.by_key[key]).memory for key in known}
    said = [key for key, memory in outlooks.items() if memory.upper <= space.memory_limit]
    return Result(
        name=case.name,
        has_nvme=any("nvme" in engine.rung.devices for engine in space.engines),
        regret=regret,
        auto_seconds=history.search_seconds(),
        auto_trials=len({record.trial for record in history.records if record.purpose == "measure"}),
        restart_seconds=history.restart_seconds(),
        sweep_seconds=sweep.search_seconds(),
        tpe_seconds=others[0].search_seconds(),
        random_seconds=others[1].search_seconds(),
        memory_errors=tuple(outlooks[key].peak / known[key] - 1 for key in speeds),
        num_said_to_fit=len(said),
        num_unsafe=sum(known[key] > space.memory_limit for key in said),
        decision_seconds=thought,
    )


def regret_of(history: MemoryHistory, speeds: dict[str, float]) -> float:
    """Of the fastest measured candidate; 1 where nothing was found."""
    best = next(iter(ranking(history.records)), None)
    return 1.0 if best is None else 1 - speeds[best.candidate_key] / max(speeds.values())


def samplers(seed: int) -> list[optuna.samplers.BaseSampler]:
    return [optuna.samplers.TPESampler(seed=seed), optuna.samplers.RandomSampler(seed=seed)]


def asking(sampler: optuna.samplers.BaseSampler, speeds: dict[str, float], enough: float) -> Strategy:
    """Optuna by ask-and-tell, a trial for each new candidate, until its best is within `enough` of the truth."""
    study = optuna.create_study(direction="maximize", sampler=sampler)

    def value(record: Record) -> float:
        return math.log(record.tokens_per_second) if record.tokens_per_second else 0.0

    def strategy(space: Space, records: Sequence[Record]) -> Measure | Stop:
        tried = measured(records)
        asked = getattr(strategy, "asked", None)
        if asked is not None:
            study.tell(asked[0], value(tried[asked[1]]))
        best = max((speeds.get(key, 0.0) for key, record in tried.items() if record.tokens_per_second), default=0.0)
        if best >= (1 - enough) * max(speeds.values()):
            return Stop("as good as the other")
        for _ in range(_MOST_REPEATS):
            trial = study.ask()
            candidate = suggested(space, trial)
            if candidate.key not in space.by_key:  # a recorded sweep need not be whole
                study.tell(trial, 0.0)
            elif candidate.key not in tried:
                strategy.asked = (trial, candidate.key)  # type: ignore[attr-defined]
                return Measure(candidate.engine, (candidate,), "asked for")
            else:
                study.tell(trial, value(tried[candidate.key]))
        left = [candidate for candidate in space.candidates if candidate.key not in tried]
        strategy.asked = (study.ask(), left[0].key)  # type: ignore[attr-defined]
        return Measure(left[0].engine, (left[0],), "the sampler repeats itself")

    return strategy


def suggested(space: Space, trial: optuna.Trial) -> Candidate:
    """The candidate that a trial's parameters stand for."""
    engines = {engine.key: engine for engine in space.engines}
    engine = engines[trial.suggest_categorical("engine", sorted(engines))]
    every = trial.suggest_categorical("checkpoint_every", [0, 1, HALF] if "1/2" in space.checkpointing else [0, 1])
    size = space.micro_batches[trial.suggest_int("micro_batch_index", 0, len(space.micro_batches) - 1)]
    return Candidate(engine, every, size, space.sequences_per_rank // size)


def run_machine(number: int, cases: Sequence[Problem]) -> list[Result]:
    """All accumulations of one machine."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    results = [run_case(case, seed=3 * number + index) for index, case in enumerate(cases)]
    return [result for result in results if result is not None]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def last_line(results: Sequence[Result]) -> str:
    regrets = [100 * result.regret for result in results]
    auto = sum(result.auto_seconds for result in results)
    errors = [abs(error) for result in results for error in result.memory_errors]
    figures = {
        "cases": len(results),
        "p95_regret_pct": round(percentile(regrets, 0.95), 2),
        "max_regret_pct": round(max(regrets), 2),
        "trial_seconds_ratio": round(auto / sum(result.sweep_seconds for result in results), 3),
        "tpe_seconds_ratio": round(auto / sum(result.tpe_seconds for result in results), 3),
        "random_seconds_ratio": round(auto / sum(result.random_seconds for result in results), 3),
        "memory_mae_pct": round(100 * statistics.mean(errors), 2),
        "unsafe_pct": round(100 * sum(r.num_unsafe for r in results) / sum(r.num_said_to_fit for r in results), 2),
    }
    return " ".join(f"{name}={value}" for name, value in figures.items())


def print_table(results: Sequence[Result]) -> None:
    groups = {group: [result for result in results if result.name.endswith(group)] for group in ("A 1", "A 4", "A 16")}
    groups["no NVMe"] = [result for result in results if not result.has_nvme]
    for group, own in {**groups, "all": list(results)}.items():
        if not own:
            continue
        ratios = sorted(result.auto_seconds / result.sweep_seconds for result in own)
        print(
            f"{group:>7}: {len(own):4d} cases  "
            f"trials {statistics.mean(r.auto_trials for r in own):4.1f}  "
            f"seconds auto {statistics.mean(r.auto_seconds for r in own):6.0f}  "
            f"sweep {statistics.mean(r.sweep_seconds for r in own):6.0f}  "
            f"TPE {statistics.mean(r.tpe_seconds for r in own):6.0f}  "
            f"random {statistics.mean(r.random_seconds for r in own):6.0f}  "
            f"auto/sweep {sum(r.auto_seconds for r in own) / sum(r.sweep_seconds for r in own):.2f}, "
            f"median {statistics.median(ratios):.2f} p95 {percentile(ratios, 0.95):.2f}  "
            f"engines again {sum(r.restart_seconds for r in own) / sum(r.auto_seconds for r in own):.1%}  "
            f"above 2 % regret {sum(r.regret > 0.02 for r in own)}, above 5 % {sum(r.regret > 0.05 for r in own)}  "
            f"deciding {statistics.mean(r.decision_seconds for r in own):.2f} s"
        )
    for result in sorted(results, key=lambda result: -result.regret)[:8]:
        if result.regret > 0.02:
            print(f"  regret {result.regret:.1%}: {result.name}")


def print_recorded(results: Sequence[Result]) -> None:
    for result in results:
        print(
            f"recorded {result.name}: regret {result.regret:.1%}, {result.auto_trials} trials, seconds auto "
            f"{result.auto_seconds:.0f} sweep {result.sweep_seconds:.0f} TPE {result.tpe_seconds:.0f} "
            f"random {result.random_seconds:.0f}, memory error "
            f"{statistics.mean(abs(error) for error in result.memory_errors):.1%}, unsafe {result.num_unsafe}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cap a whole sweep, and machines for 40 seconds")
    parser.add_argument("--machines", type=int, default=240)
    parser.add_argument("--first", type=int, default=0, help="the number of the first machine: others than those seen")
    parser.add_argument("--surprise", type=float, default=1.0, help="how far machines stray; 2 is twice as far")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--adapters", action="store_true", help="train by LoRA and QLoRA on the simulated machines")
    parser.add_argument(
        "--known", action="store_true", help="as if `ladder doctor --measure` had measured the machines"
    )
    options = parser.parse_args()
    began = time.monotonic()
    results: list[Result] = []
    sweeps = [
        sweep
        for sweep in recorded_sweeps(ACCUMULATIONS, every_cap=not options.quick)
        if not (options.adapters or options.known)
        and (sweep.is_whole or not options.quick)  # the others are shown only
    ]
    with multiprocessing.Pool(options.jobs) as pool:
        # The recorded sweeps come first: they are few, and real.
        recorded = [(pool.apply_async(run_machine, (0, [sweep])), sweep.is_whole) for sweep in sweeps]
        machines = simulated_cases(
            options.machines, options.surprise, options.first, adapters=options.adapters, known=options.known
        )
        pending = [pool.apply_async(run_machine, each) for each in enumerate(machines, options.first)]
        for each, is_whole in recorded:
            print_recorded(each.get())
            results += each.get() if is_whole else []
        for machine in pending:
            if options.quick and time.monotonic() - began > _QUICK_SECONDS:
                break
            results += machine.get()
        pool.terminate()
    print_table(results)
    print(last_line(results))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
