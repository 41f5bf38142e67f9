"""What several test modules need. A test imports from here and never from another test."""

import helpers.counts  # noqa: F401  # first, as other helpers make shapes
from helpers.processes import Bench, Finished, is_alive, ladder, processes_with, wait_until
from helpers.values import (
    FOUR_LAYERS_CONFIG,
    SMALL_TUNE,
    TINY,
    TINY_CONFIG,
    WORLD_SIZE,
    as_a_rank_sees,
    bundled_workload,
    machine_with,
    make_candidate,
    make_measurement,
    make_record,
    problem_for,
    there,
    tiny_trial,
)
from ladder.tuning.problem import space_on

__all__ = [
    "FOUR_LAYERS_CONFIG",
    "SMALL_TUNE",
    "TINY",
    "TINY_CONFIG",
    "WORLD_SIZE",
    "Bench",
    "Finished",
    "as_a_rank_sees",
    "bundled_workload",
    "is_alive",
    "ladder",
    "machine_with",
    "make_candidate",
    "make_measurement",
    "make_record",
    "problem_for",
    "processes_with",
    "space_on",
    "there",
    "tiny_trial",
    "wait_until",
]
