"""Tunes without the command line: the loop over whatever launcher a test brings, and the call on a machine on paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ladder
from helpers.values import PAPER, WORLD_SIZE
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Rung, Technique
from ladder.launch.base import Launcher
from ladder.machine.described import Machine
from ladder.runs.history import History
from ladder.tuning.problem import space_on
from ladder.tuning.tuner import Tuner, TuneResult
from ladder.tuning.venues.base import OpenVenue
from ladder.units import GIB
from ladder.workload.workload import Workload

TWO_RANKS = Machine(device="cpu", world_size=WORLD_SIZE, memory_limit=GIB, host_memory=8 * GIB, num_cores=2)
ZERO1_AND_ZERO2 = (RUNGS_BY_NAME["zero1"], RUNGS_BY_NAME["zero2"])


def tune_over(
    launcher: Launcher,
    folder: Path,
    workload: Workload,
    *,
    strategy: Any,
    machine: Machine = TWO_RANKS,
    rungs: Sequence[Rung] = ZERO1_AND_ZERO2,
    micro_batches: tuple[int, ...] = (1, 2, 4),
    techniques: Sequence[Technique] = (),
    **options: Any,
) -> TuneResult:
    """Tune with a history in `folder`, unwatched unless `tell` is among the tuner's `options`."""
    of_place = {name: options.pop(name) for name in ("operators", "clock", "swap_prefix") if name in options}
    space, unsupported = space_on(workload, machine, rungs, micro_batches, techniques=techniques)
    with History(folder, "abc", {}) as history:
        return Tuner(
            place=OpenVenue(machine=machine, launcher=launcher, **of_place),
            space=space,
            unsupported=unsupported,
            history=history,
            **options,
        ).tune(strategy)


def on_paper(folder: Path, model: str, **options: Any) -> ladder.Tuned:
    """A tune on one H200 on paper, or on what `options` say, with all its files in `folder`."""
    folder.mkdir(exist_ok=True)
    files = {"run_dir": folder / "run", "output": folder / "best_config.json"}
    return ladder.tune(model, **{**PAPER, **files, **options})
