"""Shows a tune as plain lines on stderr."""

from __future__ import annotations

import sys

from ladder.events.outcome import Record
from ladder.events.protocol import TrialSpec
from ladder.events.verdict import trial_seconds
from ladder.report.times import trial_line
from ladder.search.space import measured
from ladder.techniques.keys import engine_in
from ladder.tuning.tune_events import Note, SearchBegins, TrialBegins, TrialEnds, TuneEvent
from ladder.units import format_bytes


def engine_key_of(spec: TrialSpec) -> str:
    """The key of the engine of all candidates of the trial."""
    return engine_in(spec.candidates[0].key).key


class PlainTune:
    """Shows a tune as plain lines, and remembers whether its trials are simulated."""

    def __init__(self) -> None:
        self._on_paper = False

    def __call__(self, event: TuneEvent) -> None:
        """Handle the next event of the tune."""
        if isinstance(event, SearchBegins):
            self._on_paper = event.on_paper
        plain_lines(event, on_paper=self._on_paper)


def plain_lines(event: TuneEvent, *, on_paper: bool = False) -> None:
    """One line when a trial begins, and one for each candidate that it measured. Events of ranks are not shown."""
    match event:
        case Note():
            say(event.text)
        case SearchBegins(records=records) if records:
            known, all_of_them = len(measured(records)), len(event.space.candidates)
            say(f"Continuing: {known} of {all_of_them} candidates are measured already.")
        case TrialBegins(spec=spec):
            several = f"{len(spec.candidates)} candidates" if len(spec.candidates) > 1 else "1 candidate"
            what = "proof of" if spec.proof else "probe of" if spec.probe else f"{several} of"
            engine = spec.candidates[0].key if spec.proof else engine_key_of(spec)
            say(f"trial {spec.trial}: {what} {engine} ({event.reason})")
        case TrialEnds():
            for record in event.records:
                _say_outcome(record)
            told = {record.candidate_key for record in event.records}
            if told and all(record.outcome.kind == "fits" for record in event.records):
                for key in [each.key for each in event.run.spec.candidates if each.key not in told]:
                    say(f"  {key:<40} left out: it could no longer win, or no time was left")
            say(f"  {'would have taken ' if on_paper else ''}{trial_line(trial_seconds(event.run))}")


def say(text: str) -> None:
    """Print a line on stderr without buffering."""
    print(text, file=sys.stderr, flush=True)


def _say_outcome(record: Record) -> None:
    if record.purpose == "probe" and record.measurement is not None:
        step = record.measurement.boundary_seconds
        say(f"  {record.candidate_key:<40} {step:>12.3f} s for a step with a few layers")
    elif record.outcome.kind == "fits" and record.measurement is not None:
        speed, memory = record.tokens_per_second or 0.0, format_bytes(record.measurement.peak_device)
        say(f"  {record.candidate_key:<40} {speed:>12,.0f} tokens/s {memory:>12}")
    else:
        say(f"  {record.candidate_key:<40} {record.outcome.kind}: {record.outcome.sentence}")
    for warning in record.warnings:
        say(f"    warning: {warning}")
