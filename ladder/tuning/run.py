"""Runs one whole tune: workload and machine, operators, launcher, search, proof, files."""

from __future__ import annotations

import errno
import importlib.metadata
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder import __version__
from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Rung, Technique
from ladder.emit import Answer, best_config, emit_all
from ladder.emit.plain import emit_plain
from ladder.events.outcome import Record
from ladder.machine.described import Machine
from ladder.machine.lease import Leases
from ladder.report.run_data import ReportedRun
from ladder.report.writing import write_reports
from ladder.runs.history import History
from ladder.runs.snapshot import space_to_dict
from ladder.search.cost import COMPARISONS
from ladder.search.decisions import Strategy
from ladder.search.ledger import Entry, ledger
from ladder.search.policy import STRATEGIES, faster_without_deepspeed
from ladder.search.rehearsal import in_words, price
from ladder.search.relevance import relevant
from ladder.search.space import Space
from ladder.tuning.answering import answer_of
from ladder.tuning.declaring import checked
from ladder.tuning.in_turn import tune_in_turn
from ladder.tuning.known import learn, with_known
from ladder.tuning.operators import OperatorMissingError
from ladder.tuning.option_checks import backends_in, require_effective_options, require_text, require_workload
from ladder.tuning.options import TuneOptions, choices_in, num_knob_trials
from ladder.tuning.outputs import read_files, require_folder, require_writable
from ladder.tuning.own_script import suiting
from ladder.tuning.preparation import obstacles, require_precision, without_operator
from ladder.tuning.problem import (
    make_space,
    micro_batches_of,
    problem_of,
    run_fingerprint,
    split_supported,
)
from ladder.tuning.reach import require_within_reach
from ladder.tuning.technique_choices import libraries_of, require_effective_techniques, ways_of_checkpointing
from ladder.tuning.tune_events import Note, SearchBegins, Subscriber, TuneEnds, ignore, noting
from ladder.tuning.tuner import ReferenceLosses, Tuner, TuneResult
from ladder.tuning.venue import OpenVenue, Venue, venue_of
from ladder.tuning.workload_and_machine import workload_and_machine
from ladder.workload.workload import Workload

# Errors of the disk; any other OSError in a tune is a bug.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})
_DELIVERY_SECONDS = 2.0
"""After the proof, for the files of the answer, the report and the end of the trial server. Measured: 2.0 s on two busy
CPU cores."""
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "optuna")


@dataclass(frozen=True, kw_only=True)
class TuneOutput:
    """What a tune returns: its result, the answer if one is proven, and the files written."""

    result: TuneResult
    answer: Answer | None
    """DeepSpeed's fastest."""
    files: list[Path]
    run_dir: Path
    trial_seconds: dict[str, dict[str, float]]
    """Seconds by trial and phase."""
    simulated: str | None = None
    """The name of the machine on paper; None for a real one."""
    plain: Answer | None = None
    """The fastest without DeepSpeed, if it is faster than `answer`."""

    @property
    def ledger(self) -> list[Entry]:
        """Every candidate of the tune, with its outcome or why it was not tried."""
        result = self.result
        return ledger(result.space, result.records, result.unsupported, on_paper=self.simulated is not None)


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A tune that is ready to begin: its options are checked."""

    options: TuneOptions
    began: float
    """When the tune began, on CLOCK_MONOTONIC; a wait for GPUs is left out."""
    workload: Workload
    machine: Machine
    rungs: list[Rung]
    micro_batches: tuple[int, ...]
    techniques: list[Technique]
    versions: dict[str, str]
    fingerprint: str
    facts: dict[str, Any]
    run_dir: Path


@dataclass(frozen=True, kw_only=True)
class _Searched:
    """What the search returns after its last trial."""

    result: TuneResult
    trial_seconds: dict[str, dict[str, float]]


def run_tune(
    options: TuneOptions, tell: Subscriber = ignore, cancelled: Callable[[], bool] = lambda: False
) -> TuneOutput:
    """Tune, prove, and write the answer. Raises a LadderError for everything that is not a bug."""
    began, options = time.monotonic(), checked(options)
    require_workload(options)
    require_text(options)
    require_effective_options(options)
    with (
        Leases(wait=options.wait, note=noting(tell), cancelled=cancelled) as leases,
        closing(venue_of(options, leases, tell, cancelled)) as venue,
    ):
        prepared = _prepare(options, venue, tell)
        prepared = replace(prepared, began=began + leases.waited)
        leases.name_run(prepared.run_dir)
        searched = _search(prepared, venue, tell, cancelled)
        done = _deliver(prepared, searched, venue, tell)
        if venue.paper_name is None:
            learn(prepared.machine, searched.result.space, searched.result.records, prepared.run_dir, tell)
    tell(TuneEnds(done.answer, stopped=done.result.stopped, interrupted=done.result.cancelled))
    return done


def space_of(options: TuneOptions, leases: Leases, tell: Subscriber = ignore) -> Space:
    """The space that a tune would search, without running a trial. Raises what `run_tune` raises before a trial."""
    with closing(venue_of(options, leases, tell, lambda: False)) as venue:
        prepared = _prepare(options, venue, tell)
    space, _ = _space(prepared, prepared.machine)
    return space


def _prepare(options: TuneOptions, venue: Venue, tell: Subscriber) -> _Prepared:
    """Check everything that could make the tune fail later, so that hours of trials are not lost."""
    workload, machine = workload_and_machine(options, venue, tell)
    if venue.paper_name is None:
        machine = with_known(machine, tell)
    micro_batches = micro_batches_of(workload, machine.world_size, options.micro_batches)
    techniques, rungs = venue.techniques(choices_in(options), workload, machine), _rungs(options)
    if workload.script is not None:
        techniques = suiting(techniques, workload.script)
    require_effective_techniques(techniques, problem_of(workload, machine), rungs)
    versions = package_versions()
    require_writable(options.output, read_files(options, workload.model))
    if options.save_weights is not None:
        require_folder(options.save_weights)
    fingerprint, facts = run_fingerprint(workload, machine, versions, venue.laws)
    return _Prepared(
        options=options,
        began=time.monotonic(),
        workload=workload,
        machine=machine,
        rungs=rungs,
        micro_batches=micro_batches,
        techniques=techniques,
        versions=versions,
        fingerprint=fingerprint,
        facts=facts,
        run_dir=options.run_dir or Path("ladder-runs") / f"{_slug(workload.model.name)}-{fingerprint}",
    )


def _search(prepared: _Prepared, venue: Venue, tell: Subscriber, cancelled: Callable[[], bool]) -> _Searched:
    """Run trials until the search has ended and its winner is proven."""
    workload, run_dir = prepared.workload, prepared.run_dir
    on_paper = venue.paper_name is not None
    if not on_paper:  # a simulated trial costs nothing, so the prediction need not decide
        require_precision(prepared.machine, workload)
        _require_within_reach(prepared)
    with (
        History(run_dir, prepared.fingerprint, prepared.facts) as history,
        _disk_faults(history),
        venue.opened(prepared.machine, workload, prepared.rungs, run_dir) as opened,
    ):
        place = opened
        while True:
            try:
                result = _search_at(place, prepared, history, on_paper, tell, cancelled)
                return _Searched(result=result, trial_seconds=history.trial_seconds(result.records))
            except OperatorMissingError as missing:
                machine = without_operator(place.machine, prepared.rungs, workload, missing)
                place = replace(place, machine=machine)


def _search_at(
    place: OpenVenue,
    prepared: _Prepared,
    history: History,
    on_paper: bool,
    tell: Subscriber,
    cancelled: Callable[[], bool],
) -> TuneResult:
    """Search among what `place` supports; OperatorMissingError if it turns out to support less."""
    options, workload = prepared.options, prepared.workload
    space, unsupported = _space(prepared, place.machine)
    history.note_space(space_to_dict(space), {rung.name: reason for rung, reason in unsupported.items()})
    tell(SearchBegins(space, unsupported, relevant(space, history.records), on_paper))
    spent_before = 0.0 if on_paper else place.seconds_since(prepared.began)
    reference_losses: ReferenceLosses = {}

    def tuner(part: Space, spent: float, knob_trials: int) -> Tuner:
        return Tuner(
            workload=workload,
            machine=place.machine,
            space=part,
            aside=space,
            unsupported=unsupported,
            history=history,
            launcher=place.launcher,
            operators=place.operators,
            tell=tell,
            cancelled=cancelled,
            time_budget=options.time_budget,
            spent=spent or spent_before,
            after=0.0 if on_paper else _DELIVERY_SECONDS,
            swap_prefix=place.swap_prefix,
            save_folder=options.save_weights,
            clock=place.clock,
            knob_trials=knob_trials,
            parity=not on_paper,  # simulated trials have no losses
            reference_losses=reference_losses,
        )

    strategy, num_knobs = STRATEGIES[options.strategy], num_knob_trials(options)
    if not on_paper and not relevant(space, history.records):  # the trial server is importing its packages meanwhile
        _say_price(space, strategy, options.time_budget, tell)
    return tune_in_turn(tuner, space, strategy, knob_trials=num_knobs)


def _say_price(space: Space, strategy: Strategy, time_budget: float | None, tell: Subscriber) -> None:
    """Say how long the tune will take before its first trial."""
    found = price(space, strategy, comparisons=COMPARISONS)
    if found is None:
        return
    if time_budget is None or found.seconds <= time_budget:
        tell(Note(f"The tune will take {found.sentence()}."))
    else:
        tell(Note(f"A whole search would take {found.sentence()}. The time budget is {in_words(time_budget)}."))


def _require_within_reach(prepared: _Prepared) -> None:
    """NothingFitsError if nothing comes near fitting. Not for an exhaustive search or one that has a history."""
    options, machine = prepared.options, prepared.machine
    if options.strategy == "exhaustive" or (prepared.run_dir / "journal.log").exists():
        return
    unsupported = obstacles(prepared.rungs, machine, prepared.workload)
    space, missing = _space(prepared, replace(machine, unsupported=unsupported))
    require_within_reach(space, [rung.name for rung in missing], asked_for_cpu=options.gpus == 0)


def _space(prepared: _Prepared, machine: Machine) -> tuple[Space, dict[Rung, str]]:
    """The space to search on `machine`, and the rungs that cannot work there."""
    options, (supported, unsupported) = prepared.options, split_supported(prepared.rungs, machine, prepared.workload)
    space = make_space(
        problem_of(prepared.workload, machine),
        supported,
        prepared.micro_batches,
        techniques=prepared.techniques,
        checkpointing=ways_of_checkpointing(prepared.versions["transformers"], documented=options.documented),
        tolerance=options.tolerance,
        audit=options.audit,
    )
    return space, unsupported


def _deliver(prepared: _Prepared, searched: _Searched, venue: Venue, tell: Subscriber) -> TuneOutput:
    """Write the answer's files and the reports."""
    result, answer = searched.result, None
    faster = faster_without_deepspeed(result.records, result.space.tolerance)
    plain = _answer(prepared, result, faster, venue) if faster is not None else None
    if result.answer is not None and result.answer != faster:
        found = _answer(prepared, result, result.answer, venue)
        answer = replace(found, learning_rate=prepared.options.with_optimizer, plain=plain)
    files = emit_all(answer, prepared.options.output) if answer else []
    files += emit_plain(plain, prepared.options.output) if plain else []
    reported = ReportedRun(
        folder=prepared.run_dir,
        space=result.space,
        unsupported=result.unsupported,
        records=result.records,
        trial_seconds=searched.trial_seconds,
        facts=prepared.facts,
        config=best_config(answer) if answer else None,
    )
    for trouble in write_reports(reported, answer):
        tell(Note(f"Warning: {trouble}"))
    return TuneOutput(
        result=result,
        answer=answer,
        files=files,
        run_dir=prepared.run_dir,
        trial_seconds=searched.trial_seconds,
        simulated=venue.paper_name,
        plain=plain,
    )


def _answer(prepared: _Prepared, result: TuneResult, proof: Record, venue: Venue) -> Answer:
    versions = package_versions(libraries_of(result.space.by_key[proof.candidate_key].engine))
    machine = prepared.machine
    run_dir, records = prepared.run_dir, result.records
    found = answer_of(proof, prepared.workload, machine, result.space, versions, run_dir, records)
    return venue.signed(found, machine)


def _rungs(options: TuneOptions) -> list[Rung]:
    """The rungs to try."""
    if options.rungs:
        return [rung for rung in RUNGS_BY_NAME.values() if rung.name in options.rungs]
    rungs = [rung for backend in backends_in(options) for rung in backend.rungs]
    return [rung for rung in rungs if rung.documented or not options.documented]


@contextmanager
def _disk_faults(history: History) -> Iterator[None]:
    """Turn errors of a full or broken disk in the block into EnvironmentFaultError, whichever file they concern."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS and history.folder.is_dir():  # a removed run folder counts too
            raise
        raise history.unwritable(error) from error


def package_versions(others: Iterable[str] = ()) -> dict[str, str]:
    """Versions of the packages that affect measurements, and of `others`, without importing them."""
    versions = {"ladder": __version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *others):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name.strip("/").rsplit("/", 1)[-1]).strip("-.") or "model"
