"""Runs one whole tune: workload and machine, operators, launcher, search, proof, files."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from ladder.backends.registry import REFERENCE, REFERENCE_OF_TORCH
from ladder.doctor.software import about_torch
from ladder.errors import UsageError
from ladder.machine.described import Machine
from ladder.machine.environment import ranks_in
from ladder.machine.interpreter import is_own
from ladder.machine.lease import Leases
from ladder.options.checks import require_effective_options, require_text, require_workload
from ladder.options.declaring import checked
from ladder.options.tune import TuneOptions, num_knob_trials
from ladder.report.writing import load_page
from ladder.runs.history import History
from ladder.runs.snapshot import knowing_what_was_known, space_to_dict
from ladder.search.cost import COMPARISONS
from ladder.search.decisions import Strategy
from ladder.search.ledger import ledger
from ladder.search.policy import STRATEGIES, answer
from ladder.search.rehearsal import in_words, price
from ladder.search.relevance import relevant
from ladder.search.space import Space, of_main_backend
from ladder.tuning.answering import TuneOutput, deliver, write_first
from ladder.tuning.known import learn
from ladder.tuning.obstacles import missing_package, obstacles, without_operator
from ladder.tuning.operators import OperatorMissingError
from ladder.tuning.parity import Agreements, Comparisons
from ladder.tuning.prepared import Prepared, prepare, supported_space
from ladder.tuning.reach import require_within_reach
from ladder.tuning.tune_events import Note, SearchBegins, Subscriber, TuneEnds, ignore, meanwhile, noting
from ladder.tuning.tuner import Tuner, TuneResult
from ladder.tuning.venues import venue_of
from ladder.tuning.venues.base import OpenVenue, Venue
from ladder.workload.workload import Workload

# Errors of the disk; any other OSError in a tune is a bug.
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE})
_DELIVERY_SECONDS = 1.0
"""After the proof, for the files of the answer, the report and the end of the trial server. Chosen: more than the 0.2 s
on two busy CPU cores (measured: benchmarks/results/time-to-answer)."""


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
        result, trial_seconds = _search(prepared, venue, tell, cancelled)
        done = deliver(prepared, result, trial_seconds, venue, tell)
        if venue.paper_name is None:
            learn(prepared.machine, result.space, result.records, prepared.run_dir, tell)
    tell(TuneEnds(done.answer, stopped=done.result.stopped, interrupted=done.result.cancelled))
    return done


def space_of(options: TuneOptions, leases: Leases) -> Space:
    """The space that a tune would search, without running a trial. Raises what `run_tune` raises before a trial."""
    with closing(venue_of(options, leases, ignore, lambda: False)) as venue:
        prepared = prepare(options, venue, ignore)
    space, _ = supported_space(prepared, prepared.machine)
    return space


def _search(
    prepared: Prepared, venue: Venue, tell: Subscriber, cancelled: Callable[[], bool]
) -> tuple[TuneResult, dict[str, dict[str, float]]]:
    """Run trials until the search has ended and its winner is proven; also the seconds by trial and phase."""
    workload, run_dir = prepared.workload, prepared.run_dir
    on_paper = venue.paper_name is not None
    if not on_paper:  # a simulated trial costs nothing, so the prediction need not decide
        _require_precision(prepared.machine, workload)
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
                return result, history.trial_seconds(result.records)
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
    on_paper, options = venue.paper_name is not None, prepared.options
    space, unsupported = supported_space(prepared, place.machine)
    space = knowing_what_was_known(space, history.space)
    history.note_space(space_to_dict(space), {rung.name: reason for rung, reason in unsupported.items()})
    tell(SearchBegins(space, unsupported, relevant(space, history.records), on_paper))
    spent_before = 0.0 if on_paper else place.clock() - prepared.began
    if not on_paper:  # the reports will ask for the same predictions
        tell = meanwhile(tell, lambda: ledger(space, relevant(space, history.records), unsupported))
    # Simulated trials have no losses.
    reference = REFERENCE_OF_TORCH if missing_package(REFERENCE.rung) else REFERENCE
    agreements = Agreements(machine=place.machine)
    comparisons = None if on_paper else Comparisons(agreements=agreements, reference=reference)

    def tuner(part: Space, spent: float, knob_trials: int | None) -> Tuner:
        return Tuner(
            place=place,
            space=part,
            aside=space,
            unsupported=unsupported,
            history=history,
            tell=tell,
            cancelled=cancelled,
            time_budget=options.time_budget,
            spent=spent or spent_before,
            after=0.0 if on_paper else _DELIVERY_SECONDS,
            save_folder=options.save_weights,
            knob_trials=knob_trials,
            deliver=lambda result: write_first(prepared, result, venue, tell),
            comparisons=comparisons,
        )

    strategy, num_knobs = STRATEGIES[options.strategy], num_knob_trials(options)
    # What follows takes no time of the tune: the trial server is importing its packages meanwhile.
    load_page()
    if not on_paper and not relevant(space, history.records):
        _say_price(space, strategy, options.time_budget, tell)
    return tune_in_turn(tuner, space, strategy, knob_trials=num_knobs)


MakeTuner = Callable[[Space, float, int | None], Tuner]
"""A tuner of a space, with the seconds that were spent before it and its trials of knobs."""


def tune_in_turn(tuner: MakeTuner, space: Space, strategy: Strategy, *, knob_trials: int | None) -> TuneResult:
    """The result over all of `space`; its answer is DeepSpeed's where DeepSpeed has one.

    The first search is the same as without the other rungs, but for trials of those while it waits for an operator. The
    second begins with what was measured, so that only what may be faster than DeepSpeed's best gets a trial.
    """
    own = of_main_backend(space)
    if not own.engines or own.engines == space.engines:
        return tuner(space, 0.0, knob_trials).tune(strategy)
    first = tuner(own, 0.0, knob_trials).tune(strategy)
    if first.cancelled:
        return first
    whole = tuner(space, first.seconds, 0).tune(strategy)
    return replace(whole, answer=answer(whole.records), first=first.first or whole.first)


def _say_price(space: Space, strategy: Strategy, time_budget: float | None, tell: Subscriber) -> None:
    """Say how long the tune will take before its first trial."""
    found = price(space, strategy, comparisons=COMPARISONS)
    if found is None:
        return
    if time_budget is None or found.seconds <= time_budget:
        tell(Note(f"The tune will take {found.sentence()}."))
    else:
        tell(Note(f"A whole search would take {found.sentence()}. The time budget is {in_words(time_budget)}."))


def _require_precision(machine: Machine, workload: Workload) -> None:
    """UsageError if every trial would fail because the CPU cannot train in the workload's precision."""
    if machine.device != "cpu" or workload.dtype != "fp16":
        return
    try:
        has_fp16 = about_torch()["cpu_fp16"]
    except (OSError, subprocess.TimeoutExpired):
        return  # the trials will say what is wrong with torch
    if not has_fp16:
        raise UsageError("This CPU cannot train in fp16, which needs AVX512-FP16 instructions; use --dtype bf16.")


def _require_within_reach(prepared: Prepared) -> None:
    """NothingFitsError if nothing comes near fitting. Not for an exhaustive search or one that has a history."""
    options, machine = prepared.options, prepared.machine
    if options.strategy == "exhaustive" or (prepared.run_dir / "journal.log").exists():
        return
    unsupported = obstacles(prepared.rungs, machine, prepared.workload)
    space, missing = supported_space(prepared, replace(machine, unsupported=unsupported))
    require_within_reach(space, [rung.name for rung in missing], asked_for_cpu=options.gpus == 0)


@contextmanager
def disk_faults(history: History) -> Iterator[None]:
    """Turn errors of a full or broken disk in the block into EnvironmentFaultError, whichever file they concern."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS and history.folder.is_dir():  # a removed run folder counts too
            raise
        raise history.unwritable(error) from error
