"""How long a tune is said to take before it begins, against how long it takes on machines on paper."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from helpers import bundled_workload, there
from helpers.tunes import tune_over

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.search.policy import STRATEGIES
from ladder.search.rehearsal import price
from ladder.simulation.launcher import SimulatedLauncher
from ladder.simulation.paper_machine import read_machine

_CASES = (
    ("a10", 1, "opt-1.3b", 64),
    ("a100-40", 4, "llama-2-7b", 128),
    ("a100-80", 2, "llama-2-7b", 32),
    ("h100-80", 8, "llama-2-7b", 128),
    ("h200", 2, "qwen2.5-7b", 128),
    ("l4", 4, "llama-3.2-1b", 64),
    ("l40s", 2, "llama-3.2-1b", 64),
    ("rtx-4090", 1, "llama-3.2-1b", 32),
)
_NEAR = math.log(1.5)


def ratio(folder: Path, machine: str, gpus: int, model: str, batch: int, seed: int) -> float:
    """The logarithm of the seconds that were said over those that the tune took."""
    simulated = read_machine(machine).model_copy(update={"seed": seed})
    workload = bundled_workload(model, seq_len=1024, global_batch_size=batch)
    launcher = SimulatedLauncher(simulated, model=workload.model)
    result = tune_over(
        launcher,
        folder,
        workload,
        strategy=STRATEGIES["auto"],
        machine=simulated.machine(gpus),
        rungs=[rung for rung in RUNGS if "nvme" not in rung.devices],
        micro_batches=tuple(size for size in (1, 2, 4, 8, 16) if batch // gpus % size == 0),
        clock=launcher.now,
    )
    said = there(price(result.space, STRATEGIES["auto"]))
    return math.log(said.seconds / result.seconds)


def test_most_tunes_take_as_long_as_was_said_within_a_factor_of_one_and_a_half(tmp_path: Path) -> None:
    off = [
        ratio(tmp_path / f"{case[0]} {draw}", *case, seed=number + 10 * draw)
        for draw in range(2)
        for number, case in enumerate(_CASES)
    ]
    assert sum(abs(each) < _NEAR for each in off) > len(off) / 2, [round(math.exp(each), 2) for each in off]
    assert abs(statistics.median(off)) < _NEAR
