"""What is trained, and on which machine: the one way from the options of every command to both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ladder.errors import UsageError
from ladder.launch.counting import counting
from ladder.machine.described import Machine
from ladder.machine.interpreter import version_of
from ladder.options.plan import PlanOptions
from ladder.options.tune import TuneOptions, WorkloadOptions
from ladder.text import shown
from ladder.tuning.own_script import workload_of_script
from ladder.tuning.precision import dtype_of
from ladder.units import parse_bytes
from ladder.workload.lora import lora_from_file
from ladder.workload.script import Script
from ladder.workload.shapes import default_seq_len, with_adapters
from ladder.workload.source import resolve_model, smoke_defaults
from ladder.workload.trained import check_trained
from ladder.workload.workload import ModelShape, Workload

_DEFAULT_BATCH = 128
"""Sequences per optimizer step. Chosen: usual for fine-tuning, and a power of two is divisible by most numbers of
GPUs."""


def workload_and_machine(
    options: TuneOptions | PlanOptions,
    find_machine: Callable[[], Machine],
    look: Callable[[Machine], Script],
    note: Callable[[str], None],
) -> tuple[Workload, Machine]:
    """What is trained, on the machine that `find_machine` finds; `look` looks at the user's script there.

    UsageError for what cannot be trained. `note` gets a sentence for each default that is not the usual one.
    """
    if options.script:
        machine = find_machine()
        return workload_of_script(look(machine), options, machine, note), machine
    model = resolve_model(options.model, task=options.trained_task, count=counting(note))
    if model.note:
        note(model.note)
    machine = find_machine()
    smoke = (smoke_defaults(model) or {}) if machine.device == "cpu" else {}
    # In so little memory DeepSpeed's rungs differ, and DDP does not fit.
    is_plain = version_of("torch") and not version_of("deepspeed")
    if options.gpu_memory is None and "gpu_memory" in smoke and not is_plain:
        machine = replace(machine, memory_limit=parse_bytes(smoke["gpu_memory"]))
        held = f"each CPU rank is limited to {smoke['gpu_memory']} (--gpu-memory)"
        note(f"{shown(model.name)} is a tiny model for a smoke test: {held}.")
    options = replace(
        options,
        seq_len=options.seq_len or smoke.get("seq_len"),
        global_batch_size=options.global_batch_size or smoke.get("global_batch_size"),
    )
    return workload_of(model, options, machine, note), machine


def workload_of(model: ModelShape, options: WorkloadOptions, machine: Machine, note: Callable[[str], None]) -> Workload:
    """The workload of `model`, with defaults for options that are None.

    UsageError for sequences longer than the model takes, and for adapters that it cannot have.
    """
    seq_len, ranks = options.seq_len or default_seq_len(model), machine.world_size
    dtype = dtype_of(options.dtype, machine, note)
    lora = options.lora
    if options.lora_file is not None:
        lora = lora_from_file(options.lora_file, options.model)
    if model.max_positions is not None and seq_len > model.max_positions:
        raise UsageError(
            f"--seq-len {seq_len} is more than the {model.max_positions} positions {shown(model.name)} has."
        )
    if model.made_for is not None and seq_len > model.made_for:
        note(f"Sequences of {seq_len:,} tokens are longer than the {model.made_for:,} that the model was made for.")
    model = with_adapters(model, lora, counting(note))
    check_trained(model, lora, options.load_in, options.freeze, prepare_kbit=options.prepare_kbit)
    usual = -(-_DEFAULT_BATCH // ranks) * ranks
    if options.global_batch_size is None and usual != _DEFAULT_BATCH:
        note(
            f"The global batch is {usual} sequences, because {_DEFAULT_BATCH} cannot be divided evenly over "
            f"{ranks} ranks (--global-batch-size)."
        )
    return Workload(
        model=model,
        task=options.trained_task or model.task,
        seq_len=seq_len,
        global_batch_size=options.global_batch_size or usual,
        dtype=dtype,
        optimizer=options.optimizer,
        lora=lora,
        load_in=options.load_in,
        prepare_kbit=options.prepare_kbit,
        freeze=options.freeze,
    )
