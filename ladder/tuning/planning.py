"""`ladder plan`: predicts memory and speed of each rung without a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.errors import UsageError
from ladder.machine.described import NO_LIMIT, Machine, bare_machine
from ladder.machine.environment import ranks_in
from ladder.machine.interpreter import version_of
from ladder.options.checks import require_workload
from ladder.options.plan import PlanOptions
from ladder.options.technique_choices import TechniqueChoices, require_known, techniques_tried, ways_of_checkpointing
from ladder.search.forecast import Plan, RungPlan
from ladder.search.forecast import plan as make_plan
from ladder.search.remedies import remedies
from ladder.search.space import Space
from ladder.tuning.problem import micro_batches_of, space_on
from ladder.tuning.workload_and_machine import workload_and_machine
from ladder.units import format_bytes, gib
from ladder.workload.script import Script

if TYPE_CHECKING:
    from ladder.simulation.paper_machine import SimulatedMachine


def plan_of(options: PlanOptions, note: Callable[[str], None]) -> tuple[Plan, Space]:
    """What is expected of each rung, and the space; sizes in bytes. `note` gets a sentence for each unusual default.

    UsageError if too few options are given.
    """
    with ranks_in(options.python, options.script, must_train=bool(options.script)):
        simulated = machine_named(options.machine, options.gpus, options.gpu_memory)
        require_workload(options)
        require_known(options.allow)
        machine = machine_on_paper(options, simulated)
        workload, _ = workload_and_machine(options, lambda: machine, lambda _: _look(options, machine, note), note)
        choices = TechniqueChoices(switches=options.switches, allow=options.allow)
        # As a tune with an --nvme-path, if there is a drive.
        has_nvme = simulated is None or simulated.nvme_space > 0
        space, _ = space_on(
            workload,
            machine,
            [rung for rung in RUNGS_BY_NAME.values() if has_nvme or "nvme" not in rung.devices],
            micro_batches_of(workload, machine.world_size, None),
            techniques=techniques_tried(choices, workload, "cuda", on_paper=True),
            checkpointing=ways_of_checkpointing(version_of("transformers")),
        )
        per_node = simulated.num_gpus if simulated is not None and options.host_memory is None else None
        return make_plan(space, per_node), space


def _look(options: PlanOptions, planned: Machine, note: Callable[[str], None]) -> Script:
    """At the user's script, on this host's CPU: a look trains nothing."""
    # Here: it brings all that runs processes.
    from ladder.machine.machine import detect_machine
    from ladder.tuning.script_look import look_here

    here = detect_machine(gpus=0, gpu_memory=None, host_memory=None, nvme_path=None)
    return look_here(options.script, replace(here, world_size=planned.world_size), note, lambda: False)


def machine_named(name: str | None, gpus: int | None, gpu_memory: int | None) -> SimulatedMachine | None:
    """The machine on paper of this name or file; None if none was named. UsageError if too little is known."""
    if name is None:
        missing = [option for option, value in (("--gpus", gpus), ("--gpu-memory", gpu_memory)) if value is None]
        if missing:
            raise UsageError(f"Give {' and '.join(missing)}, or a --machine such as a100-80.")
        return None
    from ladder.simulation.paper_machine import read_machine  # needs yaml, which takes time to load

    simulated = read_machine(name)
    if gpu_memory is not None and gpu_memory > simulated.gpu_memory:
        raise UsageError(
            f"--gpu-memory {format_bytes(gpu_memory)} is more than {simulated.name} has "
            f"({format_bytes(simulated.gpu_memory)}); leave one of them out."
        )
    return simulated


def machine_on_paper(options: PlanOptions, simulated: SimulatedMachine | None) -> Machine:
    """The machine that was named; if none was, GPUs of which only the memory is known."""
    if simulated is not None:
        world_size = options.gpus or simulated.num_gpus
        return simulated.machine(world_size, gpu_memory=options.gpu_memory, host_memory=options.host_memory)
    return bare_machine(options.gpus or 1, options.gpu_memory or 0, host_memory=options.host_memory)


def expected_winner(made: Plan) -> RungPlan | None:
    """The fastest rung that is predicted to fit, or else the fastest that may fit. None if no rung may fit."""
    for fits in ("yes", "perhaps"):
        if fitting := [row for row in made.rungs if row.fits == fits]:
            return max(fitting, key=lambda row: row.outlook.tokens_per_second)
    return None


def rung_row(row: RungPlan) -> dict[str, Any]:
    """A rung of the plan as values for JSON: GiB and tokens/s."""
    memory, candidate = row.outlook.memory, row.outlook.candidate
    return {
        "rung": candidate.engine.name,
        "fits": row.fits,
        "checkpointing": candidate.checkpointing,
        "micro_batch": candidate.micro_batch,
        **{f"{part}_gib": gib(num_bytes) for part, num_bytes in asdict(memory.parts).items()},
        "peak_gib": gib(memory.peak),
        "upper_gib": gib(memory.upper),
        "host_gib": gib(memory.host),
        "pinned_gib": gib(memory.pinned),
        "tokens_per_second": round(row.outlook.tokens_per_second),
        "smallest_gpus": row.smallest,
    }


def as_json(made: Plan, space: Space) -> dict[str, Any]:
    """The plan as values for JSON: GiB, seconds, tokens/s."""
    winner = expected_winner(made)
    return {
        "model": space.workload.model.name,
        "gpus": space.world_size,
        "gpu_memory_gib": gib(space.memory_limit),
        "host_memory_gib": gib(space.host_memory) if space.host_memory < NO_LIMIT else None,
        "dtype": space.workload.dtype,
        "seq_len": space.workload.seq_len,
        "global_batch_size": space.workload.global_batch_size,
        "rungs": [rung_row(row) for row in made.rungs],
        "expected_winner": rung_row(winner)["rung"] if winner is not None else None,
        "tune_seconds": round(made.tune.seconds) if made.tune else None,
        "tune_trials": made.tune.trials if made.tune else None,
        "remedies": None if made.tune else _remedies(space),
    }


def _remedies(space: Space) -> dict[str, Any]:
    sizes = ("gpu_memory", "host_memory", "lora", "qlora")
    found = remedies(space).plain()
    return {
        f"{key}_gib" if key in sizes else key: gib(value) if key in sizes and value else value
        for key, value in found.items()
    }
