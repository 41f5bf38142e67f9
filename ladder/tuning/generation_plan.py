"""What is expected of each way to generate, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ladder.generating.memory import predicted
from ladder.generating.ways import Generation, check, obstacle, sorted_out, ways_named
from ladder.machine.environment import ranks_in
from ladder.tuning.generation import generation_of
from ladder.tuning.generation_options import require_effective
from ladder.tuning.plan_options import PlanOptions
from ladder.tuning.planning import machine_named, machine_on_paper


def plan_of_generation(options: PlanOptions, note: Callable[[str], None]) -> tuple[Generation, list[dict[str, Any]]]:
    """What is generated, and for each way its memory with the smallest batch, and whether it fits."""
    require_effective(options)
    with ranks_in(options.python, must_train=False):
        simulated = machine_named(options.machine, options.gpus, options.gpu_memory)
        machine = machine_on_paper(options, simulated, options.gpus or (simulated.num_gpus if simulated else 1))
        has_nvme = simulated is None or simulated.nvme_space > 0
        problem = generation_of(options, machine, note, has_nvme=has_nvme)
    (sorted_out if problem.asked else check)(problem)
    batch = problem.batches[0] if problem.asks_batches else 1
    rows = []
    for way in ways_named(problem.asked):
        memory, why = predicted(way, problem, batch), obstacle(way, problem)
        fits = memory.device <= problem.memory_limit and memory.host <= problem.host_memory
        said = "–" if why else "yes" if fits else "no"
        rows.append({"way": way.name, "batch": batch, "fits": said, "why": why, **memory.plain()})
    return problem, rows
