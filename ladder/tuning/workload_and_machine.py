"""What a tune trains, and on which machine: found out, checked and said before anything is tried."""

from __future__ import annotations

from dataclasses import replace

from ladder.launch.counting import counting
from ladder.machine.described import Machine
from ladder.machine.interpreter import version_of
from ladder.text import shown
from ladder.tuning.options import TuneOptions
from ladder.tuning.own_script import workload_of_script
from ladder.tuning.precision import dtype_of, major_capability
from ladder.tuning.problem import what_is_trained, workload_of
from ladder.tuning.tune_events import Note, Subscriber, noting
from ladder.tuning.venue import Venue
from ladder.units import format_bytes, parameters_in_words, parse_bytes
from ladder.workload.source import resolve_model, smoke_defaults
from ladder.workload.trained import said_of_training
from ladder.workload.workload import Workload


def workload_and_machine(options: TuneOptions, venue: Venue, tell: Subscriber) -> tuple[Workload, Machine]:
    """What is trained, and on which machine; its GPUs are leased from here on."""
    if options.script:
        return _script_and_machine(options, venue, tell)
    model = resolve_model(options.model, task=options.trained_task, count=counting(noting(tell)))
    if model.note:
        tell(Note(model.note))
    machine = venue.machine()
    smoke = (smoke_defaults(model) or {}) if machine.device == "cpu" else {}
    # In so little memory DeepSpeed's rungs differ, and DDP does not fit.
    is_plain = version_of("torch") and not version_of("deepspeed")
    if options.gpu_memory is None and "gpu_memory" in smoke and not is_plain:
        machine = replace(machine, memory_limit=parse_bytes(smoke["gpu_memory"]))
        held = f"each CPU rank is limited to {smoke['gpu_memory']} (--gpu-memory)"
        tell(Note(f"{shown(model.name)} is a tiny model for a smoke test: {held}."))
    workload = workload_of(
        model,
        machine.world_size,
        noting(tell),
        count=counting(noting(tell)),
        task=options.trained_task,
        seq_len=options.seq_len or smoke.get("seq_len"),
        global_batch_size=options.global_batch_size or smoke.get("global_batch_size"),
        dtype=dtype_of(options.dtype, machine.gpu_name, noting(tell), major_capability(machine)),
        optimizer=options.optimizer,
        **what_is_trained(options),
        gradient_clipping=options.gradient_clipping,
    )
    tell(Note(_introduction(workload, machine)))
    venue.introduce()
    return workload, machine


def _script_and_machine(options: TuneOptions, venue: Venue, tell: Subscriber) -> tuple[Workload, Machine]:
    """As `workload_and_machine`, of the user's own script, after a look at it."""
    machine = venue.machine()
    script = venue.look(options.script, machine, noting(tell))
    capability = major_capability(machine)
    workload = workload_of_script(script, options, machine.world_size, noting(tell), machine.gpu_name, capability)
    tell(Note(_introduction(workload, machine)))
    return workload, machine


def _introduction(workload: Workload, machine: Machine) -> str:
    ranks = f"{machine.world_size} × {machine.gpu_name}" if machine.gpus else f"{machine.world_size} CPU ranks"
    size = parameters_in_words(workload.model.num_parameters) + said_of_training(workload)
    return (
        f"{shown(workload.model.name)} ({size}, {workload.task}) on {ranks}, "
        f"{format_bytes(machine.memory_limit)} each; {workload.dtype}, {workload.optimizer_in_words}, sequence length "
        f"{workload.seq_len}, global batch {workload.global_batch_size} sequences."
    )
