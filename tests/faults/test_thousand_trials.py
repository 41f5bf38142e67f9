"""A history of a thousand trials is as quick as a new one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from helpers import make_candidate, make_record

from ladder.runs.history import History

NUM_TRIALS = 1000
ONE_OF = 100


def seconds_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def test_the_thousandth_trial_is_recorded_as_fast_as_the_first_ones(tmp_path: Path) -> None:
    candidate = make_candidate()
    by_key = {candidate.key: candidate}
    seconds: list[float] = []

    def one_trial(history: History) -> None:
        name, folder = history.next_trial()
        folder.mkdir()
        history.add([make_record(candidate, trial=name)], by_key, {"measure": 1.0})

    with History(tmp_path / "run", "abc", {}) as history:
        for _ in range(NUM_TRIALS):
            seconds.append(seconds_of(lambda: one_trial(history)))
    first, last = sorted(seconds[:ONE_OF])[ONE_OF // 2], sorted(seconds[-ONE_OF:])[ONE_OF // 2]
    assert last < 3 * first + 0.01

    opened: list[History] = []
    assert seconds_of(lambda: opened.append(History(tmp_path / "run", "abc", {}))) < 5
    with opened[0] as history:
        assert len(history.records) == NUM_TRIALS
        assert history.next_trial()[0] == f"{NUM_TRIALS + 1:04d}"
