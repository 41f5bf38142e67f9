"""Runs one whole tune: workload and machine, operators, launcher, search, proof, files."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.backends.registry import REFERENCE, REFERENCE_OF_TORCH
from ladder.emit import Answer, best_config, files_of
from ladder.emit.files import OutputPaths, keep_others, write_files
from ladder.emit.plain import plain_output
from ladder.events.outcome import Record
from ladder.machine.environment import ranks_in
from ladder.machine.interpreter import is_own
from ladder.machine.lease import Leases
from ladder.report.run_data import ReportedRun
from ladder.report.writing import load_page, write_reports
from ladder.runs.history import History
from ladder.runs.snapshot import knowing_what_was_known, space_to_dict
from ladder.search.cost import COMPARISONS
from ladder.search.decisions import Strategy
from ladder.search.ledger import Entry, ledger
from ladder.search.policy import STRATEGIES, told
from ladder.search.rehearsal import in_words, price
from ladder.search.relevance import relevant
from ladder.search.space import Space
from ladder.tuning.answering import answer_of
from ladder.tuning.comparisons import Agreements, Comparisons
from ladder.tuning.declaring import checked
from ladder.tuning.in_turn import tune_in_turn
from ladder.tuning.known import learn
from ladder.tuning.meanwhile import meanwhile
from ladder.tuning.operators import OperatorMissingError
from ladder.tuning.option_checks import require_effective_options, require_text, require_workload
from ladder.tuning.options import TuneOptions, num_knob_trials
from ladder.tuning.own_words import in_own_words
from ladder.tuning.preparation import missing_package, obstacles, require_precision, without_operator
from ladder.tuning.prepared import Prepared, prepare, supported_space
from ladder.tuning.reach import require_within_reach
from ladder.tuning.technique_choices import libraries_of
from ladder.tuning.tune_events import Note, SearchBegins, Subscriber, TuneEnds, ignore, noting
from ladder.tuning.tuner import Tuner, TuneResult
from ladder.tuning.venue import OpenVenue, Venue, venue_of
from ladder.tuning.versions import package_versions
from ladder.workload.script import Script

# Errors of the disk; any other OSError in a tune is a bug.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})
_DELIVERY_SECONDS = 1.0
"""After the proof, for the files of the answer, the report and the end of the trial server. Chosen: more than the 0.2 s
on two busy CPU cores (measured: benchmarks/results/time-to-answer)."""


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
    kept: Sequence[Path] = ()
    """Copies of files that were in the places of `files`, and were another tune's or edited."""

    @property
    def ledger(self) -> list[Entry]:
        """Every candidate of the tune, with its outcome or why it was not tried."""
        result = self.result
        return ledger(result.space, result.records, result.unsupported, on_paper=self.simulated is not None)


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
        ranks_in(options.python, options.script, must_train=options.launcher != "simulated") as environment,
        Leases(wait=options.wait, note=noting(tell), cancelled=cancelled) as leases,
        closing(venue_of(options, leases, tell, cancelled)) as venue,
    ):
        if not is_own():
            tell(Note(environment))
        prepared = prepare(options, venue, tell)
        prepared = replace(prepared, began=began + leases.waited)
        leases.name_run(prepared.run_dir)
        searched = _search(prepared, venue, tell, cancelled)
        done = _deliver(prepared, searched, venue, tell)
        if venue.paper_name is None:
            learn(prepared.machine, searched.result.space, searched.result.records, prepared.run_dir, tell)
    tell(TuneEnds(done.answer, stopped=done.result.stopped, interrupted=done.result.cancelled))
    return done


def space_of(options: TuneOptions, leases: Leases) -> Space:
    """The space that a tune would search, without running a trial. Raises what `run_tune` raises before a trial."""
    with closing(venue_of(options, leases, ignore, lambda: False)) as venue:
        prepared = prepare(options, venue, ignore)
    space, _ = supported_space(prepared, prepared.machine)
    return space


def _search(prepared: Prepared, venue: Venue, tell: Subscriber, cancelled: Callable[[], bool]) -> _Searched:
    """Run trials until the search has ended and its winner is proven."""
    workload, run_dir = prepared.workload, prepared.run_dir
    on_paper = venue.paper_name is not None
    if not on_paper:  # a simulated trial costs nothing, so the prediction need not decide
        require_precision(prepared.machine, workload)
        _require_within_reach(prepared)
    with (
        History(run_dir, prepared.fingerprint, prepared.facts) as history,
        disk_faults(history),
        venue.opened(prepared.machine, workload, prepared.rungs, run_dir) as opened,
    ):
        place = opened
        while True:
            try:
                result = _search_at(place, prepared, history, venue, tell, cancelled)
                return _Searched(result=result, trial_seconds=history.trial_seconds(result.records))
            except OperatorMissingError as missing:
                machine = without_operator(place.machine, prepared.rungs, workload, missing)
                place = replace(place, machine=machine)


def _search_at(
    place: OpenVenue,
    prepared: Prepared,
    history: History,
    venue: Venue,
    tell: Subscriber,
    cancelled: Callable[[], bool],
) -> TuneResult:
    """Search among what `place` supports; OperatorMissingError if it turns out to support less."""
    on_paper = venue.paper_name is not None
    options, workload = prepared.options, prepared.workload
    space, unsupported = supported_space(prepared, place.machine)
    space = knowing_what_was_known(space, history.space)
    history.note_space(space_to_dict(space), {rung.name: reason for rung, reason in unsupported.items()})
    tell(SearchBegins(space, unsupported, relevant(space, history.records), on_paper))
    spent_before = 0.0 if on_paper else place.seconds_since(prepared.began)
    if not on_paper:  # the reports will ask for the same predictions
        tell = meanwhile(tell, lambda: ledger(space, relevant(space, history.records), unsupported))
    # Simulated trials have no losses.
    reference = REFERENCE_OF_TORCH if missing_package(REFERENCE.rung) else REFERENCE
    agreements = Agreements(machine=place.machine)
    comparisons = None if on_paper else Comparisons(agreements=agreements, reference=reference)

    def tuner(part: Space, spent: float, knob_trials: int | None) -> Tuner:
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
            deliver=lambda result: _write_first(prepared, result, venue, tell),
            comparisons=comparisons,
        )

    strategy, num_knobs = STRATEGIES[options.strategy], num_knob_trials(options)
    # What follows takes no time of the tune: the trial server is importing its packages meanwhile.
    load_page()
    if not on_paper and not relevant(space, history.records):
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


def _require_within_reach(prepared: Prepared) -> None:
    """NothingFitsError if nothing comes near fitting. Not for an exhaustive search or one that has a history."""
    options, machine = prepared.options, prepared.machine
    if options.strategy == "exhaustive" or (prepared.run_dir / "journal.log").exists():
        return
    unsupported = obstacles(prepared.rungs, machine, prepared.workload)
    space, missing = supported_space(prepared, replace(machine, unsupported=unsupported))
    require_within_reach(space, [rung.name for rung in missing], asked_for_cpu=options.gpus == 0)


@dataclass(frozen=True, kw_only=True)
class _Written:
    """The answers in files."""

    answer: Answer | None
    plain: Answer | None
    files: list[Path]
    kept: Sequence[Path]


def _write_first(prepared: Prepared, result: TuneResult, venue: Venue, tell: Subscriber) -> None:
    """Write the answer that is proven while the search goes on, and say so. A script's words take looks: not yet."""
    written = _write(prepared, result, venue, tell, in_words=False)
    found = written.answer or written.plain
    if found is not None:
        said = f"First answer: {found.candidate.key}, {found.tokens_per_second:,.0f} tokens/s in its proof"
        tell(Note(f"{said}, is in {written.files[0].name}. The search for a faster one goes on; Ctrl-C ends it."))


def _write(
    prepared: Prepared, result: TuneResult, venue: Venue, tell: Subscriber, *, in_words: bool = True
) -> _Written:
    """Write the answers' files, with a script's own words if `in_words`."""

    def said(found: Answer, paths: OutputPaths) -> Answer:
        return _said_in_own_words(found, prepared, paths, venue, tell) if in_words else found

    of_deepspeed, faster = told(result.records, result.space.tolerance)
    paths, answer = OutputPaths.beside(prepared.options.output), None
    plain = _answer(prepared, result, faster, venue) if faster is not None else None
    if plain is not None:
        plain = said(plain, OutputPaths.beside(plain_output(paths.config)))
    if of_deepspeed is not None:
        found = _answer(prepared, result, of_deepspeed, venue)
        answer = said(replace(found, learning_rate=prepared.options.with_optimizer, plain=plain), paths)
    texts: dict[Path, str] = {}
    for each in filter(None, (answer, plain)):
        texts |= files_of(each, paths.config)
    kept = keep_others(texts, prepared.run_dir / "written.json")
    return _Written(answer=answer, plain=plain, files=write_files(texts), kept=kept)


def _deliver(prepared: Prepared, searched: _Searched, venue: Venue, tell: Subscriber) -> TuneOutput:
    """Write the answer's files and the reports."""
    result = searched.result
    written = _write(prepared, result, venue, tell)
    answer = written.answer
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
        files=written.files,
        kept=written.kept,
        run_dir=prepared.run_dir,
        trial_seconds=searched.trial_seconds,
        simulated=venue.paper_name,
        plain=written.plain,
    )


def _said_in_own_words(
    answer: Answer, prepared: Prepared, paths: OutputPaths, venue: Venue, tell: Subscriber
) -> Answer:
    """`answer` with the command of the user's script that trains it without ladder, if there is one."""
    if not venue.looks_again:
        return answer

    def look(command: Sequence[str]) -> Script:
        return venue.look(command, prepared.machine, lambda _: None)

    return replace(answer, own_words=in_own_words(answer, paths, look, noting(tell)))


def _answer(prepared: Prepared, result: TuneResult, proof: Record, venue: Venue) -> Answer:
    versions = package_versions(libraries_of(result.space.by_key[proof.candidate_key].engine))
    run_dir, records = prepared.run_dir, result.records
    found = answer_of(proof, prepared.workload, prepared.machine, result.space, versions, run_dir, records)
    return venue.signed(found)


@contextmanager
def disk_faults(history: History) -> Iterator[None]:
    """Turn errors of a full or broken disk in the block into EnvironmentFaultError, whichever file they concern."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS and history.folder.is_dir():  # a removed run folder counts too
            raise
        raise history.unwritable(error) from error
