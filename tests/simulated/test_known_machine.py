"""A search on a machine whose speeds are known, or known wrongly: that costs time, and not the answer."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ladder.search.belief import believe
from ladder.search.policy import STRATEGIES
from ladder.search.space import Space, ranking

MOST = 0.05
"""What a search may lose at most in any case of benchmarks/search.py, with or without anything known."""

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
cases = pytest.importorskip("search_cases")


def case_of(machine: int, rates: dict[str, float]) -> Any:
    (drawn,) = cases.simulated_cases(1, first=machine)
    return replace(drawn[1], machine=replace(drawn[1].machine, rates=rates))


@cache
def speeds_of(machine: int) -> dict[str, float]:
    """The true tokens/s of each candidate that fits."""
    speeds: dict[str, float] = case_of(machine, {}).speeds()
    return speeds


def true_rates(machine: int) -> dict[str, float]:
    rates: dict[str, float] = cases.simulated_rates(case_of(machine, {}).physics)
    return rates


def errors(machine: int, rates: dict[str, float]) -> list[tuple[float, float]]:
    """Of predicted tokens/s before any trial, as logarithms: the error, and what the prediction says of it."""
    space, speeds = case_of(machine, rates).space(), speeds_of(machine)
    belief = believe(space, ())
    outlooks = {key: belief.outlook(space.by_key[key]) for key in list(speeds)[::4]}
    return [(math.log(each.speed.tokens_per_second / speeds[key]), each.deviation) for key, each in outlooks.items()]


def test_on_a_known_machine_predictions_are_better_and_as_sure_as_they_say() -> None:
    machines = range(3000, 3010)
    unknown = [error for machine in machines for error, _ in errors(machine, {})]
    known = [each for machine in machines for each in errors(machine, true_rates(machine))]
    assert rms([error for error, _ in known]) < 0.9 * rms(unknown)
    assert 0.5 < rms([error / said for error, said in known]) < 1.4


def rms(values: list[float]) -> float:
    return math.sqrt(statistics.mean(value * value for value in values))


def regret_and_trials(machine: int, space: Space) -> tuple[float, int]:
    history, speeds = cases.search(case_of(machine, {}), space, STRATEGIES["auto"]), speeds_of(machine)
    best = ranking(history.records)[0]
    trials = {record.trial for record in history.records if record.purpose == "measure"}
    return 1 - speeds[best.candidate_key] / max(speeds.values()), len(trials)


def with_earlier(machine: int, factor: Callable[[], float]) -> Space:
    """After a tune that measured a third of the space of a machine, each `factor` times as long as it takes."""
    case, speeds = case_of(machine, {}), speeds_of(machine)
    space, fast = case.space(), sorted(speeds, key=speeds.__getitem__, reverse=True)
    found = []
    for key in fast[: len(fast) // 3]:
        truth, times = case.physics.truth(space.by_key[key]), factor()
        found.append((key, truth.accumulate_seconds * times, truth.boundary_seconds * times))
    return replace(space, earlier=tuple(found))


def test_what_an_earlier_tune_measured_saves_three_of_ten_trials_and_loses_no_more_than_the_tolerance() -> None:
    usual, known = [], []
    for machine in (4000, 4001, 4002, 4003, 4006, 4008):
        usual.append(regret_and_trials(machine, case_of(machine, {}).space()))
        known.append(regret_and_trials(machine, with_earlier(machine, lambda: 1.0)))
    assert max(lost for lost, _ in known) <= 0.021
    assert sum(trials for _, trials in known) <= 0.7 * sum(trials for _, trials in usual)


def wrong_rates(machine: int, dice: random.Random) -> Space:
    """By up to four times."""
    rates = {name: rate * dice.choice((0.25, 0.5, 2.0, 4.0)) for name, rate in true_rates(machine).items()}
    return case_of(machine, rates).space()


def wrong_lessons(machine: int, dice: random.Random) -> Space:
    """Of earlier tunes."""
    names = ("compute", "launch", "gather", "reduce:2", "reduce:3", "update:none", "update:cpu")
    mean = dice.choice((-4.0, 4.0))
    return replace(case_of(machine, {}).space(), learned=tuple((name, mean, 0.5) for name in names))


def slower_now(machine: int, dice: random.Random) -> Space:
    """All earlier times by as much, as on a machine that is slower now."""
    slower = dice.choice((0.5, 0.8, 1.25, 2.0))
    return with_earlier(machine, lambda: slower)


def made_up_times(machine: int, dice: random.Random) -> Space:
    """Each by another factor."""
    return with_earlier(machine, lambda: dice.choice((0.5, 0.8, 1.25, 2.0)))


@pytest.mark.parametrize(("machine", "seed"), [(4001, 1), (4003, 2), (4006, 3), (4008, 1)])
@pytest.mark.parametrize("known", [wrong_rates, wrong_lessons, slower_now, made_up_times])
def test_what_is_known_wrongly_loses_no_more_than_any_search_may(
    known: Callable[[int, random.Random], Space], machine: int, seed: int
) -> None:
    assert regret_and_trials(machine, known(machine, random.Random(seed)))[0] <= MOST
