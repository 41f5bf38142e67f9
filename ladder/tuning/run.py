"""One whole tune from its options: workload and machine, operators, launcher, search, proof, files."""

from __future__ import annotations

import errno
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ladder import __version__
from ladder.candidates import RUNGS, Rung
from ladder.emit import Answer, best_config, emit_all
from ladder.events.outcome import Record
from ladder.machine.lease import Leases
from ladder.machine.machine import Machine, detect_machine
from ladder.machine.nvme import check_nvme_path
from ladder.report.run_data import ReportedRun
from ladder.report.writing import write_reports
from ladder.runs.history import History
from ladder.runs.snapshot import space_to_dict
from ladder.search.policy import STRATEGIES
from ladder.search.relevance import relevant
from ladder.search.space import Space
from ladder.simulation.paper_machine import SimulatedMachine
from ladder.text import shown
from ladder.tuning.answering import answer_of, said_to_be_simulated
from ladder.tuning.consent import Consent, advice, libraries_of, techniques_tried, ways_of_checkpointing
from ladder.tuning.consent import require_effect as require_effect_of_techniques
from ladder.tuning.options import TuneOptions, checked, num_knob_trials, require_effect, require_text
from ladder.tuning.outputs import read_files, require_folder, writable_output
from ladder.tuning.problem import (
    make_space,
    micro_batches_of,
    problem_of,
    run_fingerprint,
    split_supported,
    workload_of,
)
from ladder.tuning.tuner import Tuner, TuneResult, View
from ladder.tuning.venue import as_a_tune_sees_it, on_paper, on_this_host, paper_machine
from ladder.units import format_bytes, parse_bytes
from ladder.workload.source import resolve_model, smoke_defaults
from ladder.workload.workload import Workload

# The disk's, not ours; any other OSError in a tune is a bug.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "optuna")


class TuneView(View, Protocol):
    """What watches a whole tune: before its first trial it is told what is searched and what is known already."""

    def searching(self, space: Space, unsupported: Mapping[Rung, str], records: Sequence[Record]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class TuneOutput:
    """What a tune leaves behind: its result, the answer if one is proven, and the files written."""

    result: TuneResult
    answer: Answer | None
    files: list[Path]
    run_dir: Path
    trial_seconds: dict[str, dict[str, float]]
    """Where each trial's time went, by trial and phase."""
    simulated: str | None = None
    """The machine on paper that stood in for a real one."""


def run_tune(options: TuneOptions, view: TuneView, cancelled: Callable[[], bool] = lambda: False) -> TuneOutput:
    """Tune, prove, and write the answer. Raises a LadderError for everything that is not a bug."""
    options = checked(options)
    require_text(options)
    require_effect(options)
    with Leases(wait=options.wait, note=view.note, cancelled=cancelled) as leases:
        return _run_tune(options, view, cancelled, leases)


def _run_tune(options: TuneOptions, view: TuneView, cancelled: Callable[[], bool], leases: Leases) -> TuneOutput:
    paper = paper_machine(options)
    workload, machine = workload_and_machine(options, paper, view, leases)
    micro_batches = micro_batches_of(workload, machine.world_size, options.micro_batches)
    consent = Consent(switches={"liger": options.liger}, allow=options.allow, documented=options.documented)
    techniques = techniques_tried(consent, workload, machine.device, on_paper=paper is not None)
    rungs = _rungs(options)
    require_effect_of_techniques(techniques, problem_of(workload, machine), rungs)
    if paper is None:
        for sentence in advice(consent, workload, machine.device):
            view.note(sentence)
    output = writable_output(options.output, read_files(options, workload.model))
    if options.save_weights is not None:
        require_folder(options.save_weights)
    versions = package_versions()
    fingerprint, facts = run_fingerprint(workload, machine, versions, paper.model_dump() if paper else None)
    run_dir = options.run_dir or Path("ladder-runs") / f"{_slug(workload.model.name)}-{fingerprint}"
    leases.name_run(run_dir)
    with History(run_dir, fingerprint, facts) as history, _disk_faults(history):
        if paper is not None:
            opening = on_paper(paper, machine, cancelled=cancelled)
        else:
            opening = on_this_host(machine, workload, rungs, run_dir, view=view, cancelled=cancelled, cold=options.cold)
        with opening as venue:
            supported, unsupported = split_supported(rungs, venue.machine)
            space = make_space(
                problem_of(workload, venue.machine),
                supported,
                micro_batches,
                techniques=techniques,
                checkpointing=ways_of_checkpointing(versions["transformers"], documented=options.documented),
                tolerance=options.tolerance,
                audit=options.audit,
            )
            history.note_space(space_to_dict(space), {rung.name: reason for rung, reason in unsupported.items()})
            view.searching(space, unsupported, relevant(space, history.records))
            result = Tuner(
                workload=workload,
                machine=venue.machine,
                space=space,
                unsupported=unsupported,
                history=history,
                launcher=venue.launcher,
                view=view,
                cancelled=cancelled,
                time_budget=options.time_budget,
                swap_prefix=venue.swap_prefix,
                save_folder=options.save_weights,
                clock=venue.clock,
                knob_trials=num_knob_trials(options),
                parity=paper is None,  # on paper no loss falls
            ).tune(STRATEGIES[options.strategy])
        seconds = history.trial_seconds(result.records)
    answer = None
    if result.answer is not None:
        versions = package_versions(libraries_of(space.by_key[result.answer.candidate_key].engine))
        answer = answer_of(result.answer, workload, machine, space, versions, run_dir)
    if answer is not None and paper is not None:
        answer = said_to_be_simulated(answer, paper.name, machine.num_nodes)
    files = emit_all(answer, output) if answer else []
    reported = ReportedRun(
        folder=run_dir,
        space=space,
        unsupported=unsupported,
        records=result.records,
        trial_seconds=seconds,
        facts=facts,
        config=best_config(answer) if answer else None,
    )
    for trouble in write_reports(reported, answer):
        view.note(f"Warning: {trouble}")
    return TuneOutput(
        result=result,
        answer=answer,
        files=files,
        run_dir=run_dir,
        trial_seconds=seconds,
        simulated=paper.name if paper else None,
    )


def _rungs(options: TuneOptions) -> list[Rung]:
    """Those that were asked for."""
    if options.rungs:
        return [rung for rung in RUNGS if rung.name in options.rungs]
    return [rung for rung in RUNGS if rung.documented or not options.documented]


@contextmanager
def _disk_faults(history: History) -> Iterator[None]:
    """A full or broken disk under the run folder is the environment's fault, whichever file it met."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS and history.folder.is_dir():  # unless somebody removed it
            raise
        raise history.unwritable(error) from error


def workload_and_machine(
    options: TuneOptions, paper: SimulatedMachine | None, view: View, leases: Leases
) -> tuple[Workload, Machine]:
    """What is to be trained, and what on; the GPUs are leased from here on."""
    model = resolve_model(options.model, task=options.task)
    if model.note:
        view.note(model.note)
    machine = as_a_tune_sees_it(paper, options) if paper is not None else _this_host(options, leases)
    smoke = (smoke_defaults(model) or {}) if machine.device == "cpu" else {}
    if options.gpu_memory is None and "gpu_memory" in smoke:
        machine = replace(machine, memory_limit=parse_bytes(smoke["gpu_memory"]))
        view.note(
            f"{shown(model.name)} is the smoke model: each CPU rank is held to {smoke['gpu_memory']} (--gpu-memory)."
        )
    workload = workload_of(
        model,
        machine.world_size,
        view.note,
        task=options.task,
        seq_len=options.seq_len or smoke.get("seq_len"),
        global_batch_size=options.global_batch_size or smoke.get("global_batch_size"),
        dtype=options.dtype,
        optimizer=options.optimizer,
        gradient_clipping=options.gradient_clipping,
    )
    view.note(_introduction(workload, machine))
    if paper is not None:
        view.note(f"Simulated: no trial is run; all figures are of the machine {paper.name}, which exists on paper.")
    return workload, machine


def _this_host(options: TuneOptions, leases: Leases) -> Machine:
    nvme_path = options.nvme_path.resolve() if options.nvme_path is not None else None
    nvme_write_speed = check_nvme_path(nvme_path) if nvme_path is not None else None
    machine = detect_machine(
        gpus=options.gpus,
        gpu_memory=options.gpu_memory,
        host_memory=options.host_memory,
        nvme_path=nvme_path,
        choose=leases.choose,
    )
    return replace(machine, nvme_write_speed=nvme_write_speed)


def _introduction(workload: Workload, machine: Machine) -> str:
    ranks = f"{machine.world_size} × {machine.gpu_name}" if machine.gpus else f"{machine.world_size} CPU ranks"
    billions = f"{workload.model.num_parameters / 1e9:.3g} billion parameters"
    return (
        f"{shown(workload.model.name)} ({billions}, {workload.task}) on {ranks}, "
        f"{format_bytes(machine.memory_limit)} each; {workload.dtype}, {workload.optimizer}, sequence length "
        f"{workload.seq_len}, global batch {workload.global_batch_size} sequences."
    )


def package_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Versions of what decides a measurement, of `others` too, without importing any of it."""
    versions = {"ladder": __version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *others):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.strip("/").rsplit("/", 1)[-1]).strip("-.") or "model"
