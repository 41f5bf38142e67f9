"""A tune that is ready to begin: its options are checked, and what follows from them is known."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Rung, Technique
from ladder.machine.described import Machine
from ladder.machine.interpreter import version_of
from ladder.machine.versions import package_versions
from ladder.options.checks import backends_in
from ladder.options.technique_choices import advice, require_effective_techniques, ways_of_checkpointing
from ladder.options.tune import TuneOptions, choices_in
from ladder.search.space import Space
from ladder.text import shown
from ladder.tuning.known import with_known
from ladder.tuning.outputs import read_files, require_folder, require_writable
from ladder.tuning.own_script import suiting
from ladder.tuning.problem import micro_batches_of, problem_of, run_fingerprint, space_on
from ladder.tuning.tune_events import Note, Subscriber, noting
from ladder.tuning.venues.base import Venue
from ladder.tuning.workload_and_machine import workload_and_machine
from ladder.units import format_bytes, parameters_in_words
from ladder.workload.trained import said_of_training
from ladder.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A tune that is ready to begin: its options are checked."""

    options: TuneOptions
    began: float
    """When the tune began, on CLOCK_MONOTONIC; a wait for GPUs is left out."""
    workload: Workload
    machine: Machine
    rungs: list[Rung]
    micro_batches: tuple[int, ...]
    techniques: list[Technique]
    fingerprint: str
    facts: dict[str, Any]
    run_dir: Path


def prepare(options: TuneOptions, venue: Venue, tell: Subscriber) -> Prepared:
    """Check everything that could make the tune fail later, so that hours of trials are not lost."""
    workload, machine = introduced(options, venue, tell)
    is_real = venue.paper_name is None
    if is_real:
        machine = with_known(machine, workload, tell)
    micro_batches = micro_batches_of(workload, machine.world_size, options.micro_batches)
    choices, rungs = choices_in(options), _rungs(options)
    techniques = venue.techniques(choices, workload, machine)
    if workload.script is not None:
        techniques = suiting(techniques, workload.script)
    problem = problem_of(workload, machine)
    require_effective_techniques(techniques, problem, rungs)
    for sentence in advice(choices, problem, rungs) if is_real else ():
        tell(Note(sentence))
    require_writable(options.output, read_files(options, workload.model))
    if options.save_weights is not None:
        require_folder(options.save_weights)
    fingerprint, facts = run_fingerprint(workload, machine, package_versions(), venue.laws)
    return Prepared(
        options=options,
        began=time.monotonic(),
        workload=workload,
        machine=machine,
        rungs=rungs,
        micro_batches=micro_batches,
        techniques=techniques,
        fingerprint=fingerprint,
        facts=facts,
        run_dir=options.run_dir or Path("ladder-runs") / f"{slug(workload.model.name)}-{fingerprint}",
    )


def supported_space(prepared: Prepared, machine: Machine) -> tuple[Space, dict[Rung, str]]:
    """The space to search on `machine`, and the rungs that cannot work there."""
    options = prepared.options
    return space_on(
        prepared.workload,
        machine,
        prepared.rungs,
        prepared.micro_batches,
        techniques=prepared.techniques,
        checkpointing=ways_of_checkpointing(version_of("transformers"), documented=options.documented),
        tolerance=options.tolerance,
    )


def _rungs(options: TuneOptions) -> list[Rung]:
    """The rungs to try."""
    if options.rungs:
        return [rung for rung in RUNGS_BY_NAME.values() if rung.name in options.rungs]
    rungs = [rung for backend in backends_in(options) for rung in backend.rungs]
    return [rung for rung in rungs if rung.documented or not options.documented]


def slug(name: str) -> str:
    """A model's name as the beginning of its run folder's."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.strip("/").rsplit("/", 1)[-1]).strip("-.") or "model"


def introduced(options: TuneOptions, venue: Venue, tell: Subscriber) -> tuple[Workload, Machine]:
    """What is trained, and on which machine, once the user is told; its GPUs are leased from here on."""
    note = noting(tell)
    workload, machine = workload_and_machine(
        options, venue.machine, lambda machine: venue.look(options.script, machine, note), note
    )
    if not options.script:
        workload = replace(workload, gradient_clipping=options.gradient_clipping)
    note(_introduction(workload, machine))
    venue.introduce()
    return workload, machine


def _introduction(workload: Workload, machine: Machine) -> str:
    ranks = f"{machine.world_size} × {machine.gpu_name}" if machine.gpus else f"{machine.world_size} CPU ranks"
    size = parameters_in_words(workload.model.num_parameters) + said_of_training(workload)
    return (
        f"{shown(workload.model.name)} ({size}, {workload.task}) on {ranks}, "
        f"{format_bytes(machine.memory_limit)} each; {workload.dtype}, {workload.optimizer_in_words}, sequence length "
        f"{workload.seq_len}, global batch {workload.global_batch_size} sequences."
    )
