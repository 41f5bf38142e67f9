"""What a batch job asks for of its host: more than the trials held, since training loads data beside."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from helpers.answers import MEASUREMENT, answer

from ladder.emit import best_config
from ladder.emit.exporters.registry import exported
from ladder.units import GIB


def asked_gib(peak_host: int) -> int:
    document = best_config(answer(measurement=replace(MEASUREMENT, peak_host=peak_host)))
    (asked,) = re.findall(r"^#SBATCH --mem=(\d+)G$", exported(document, Path("best_config.json"), "sbatch"), re.M)
    return int(asked)


def test_a_job_asks_for_a_tenth_more_than_was_held_and_for_room_for_the_data_loaders_of_each_rank() -> None:
    ranks = answer().world_size
    assert asked_gib(200 * GIB) - asked_gib(100 * GIB) == 110
    assert asked_gib(100 * GIB) >= 110 + 2 * ranks
