"""A tune as plain lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ladder.candidates import Rung
from ladder.events.outcome import Record
from ladder.events.protocol import Event, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.events.verdict import trial_seconds
from ladder.report.times import trial_line
from ladder.search.space import Space, measured
from ladder.units import format_bytes


def engine_of(spec: TrialSpec) -> str:
    """The engine that all candidates of the trial have in common."""
    return spec.candidates[0].key.rsplit(" ckpt=", 1)[0]


class PlainView:
    """One line when a trial begins, one for each candidate it measured."""

    def note(self, text: str) -> None:
        self._line(text)

    def searching(self, space: Space, unsupported: Mapping[Rung, str], records: Sequence[Record]) -> None:
        if records:
            self._line(
                f"Going on: {len(measured(records))} of {len(space.candidates)} candidates are measured already."
            )

    def trial_begins(self, spec: TrialSpec, reason: str) -> None:
        several = f"{len(spec.candidates)} candidates" if len(spec.candidates) > 1 else "1 candidate"
        what = "proof of" if spec.proof else "probe of" if spec.probe else f"{several} of"
        engine = spec.candidates[0].key if spec.proof else engine_of(spec)
        self._line(f"trial {spec.trial}: {what} {engine} ({reason})")

    def event(self, rank: int, event: Event) -> None:
        """Plain lines show whole trials only."""

    def trial_ends(self, run: TrialRun, records: Sequence[Record]) -> None:
        for record in records:
            if record.purpose == "probe" and record.measurement is not None:
                step = record.measurement.boundary_seconds
                self._line(f"  {record.candidate_key:<40} {step:>12.3f} s for a step of few layers")
            elif record.outcome.kind == "fits" and record.measurement is not None:
                speed, memory = record.tokens_per_second or 0.0, format_bytes(record.measurement.peak_device)
                self._line(f"  {record.candidate_key:<40} {speed:>12,.0f} tokens/s {memory:>12}")
            else:
                self._line(f"  {record.candidate_key:<40} {record.outcome.kind}: {record.outcome.sentence}")
            for warning in record.warnings:
                self._line(f"    warning: {warning}")
        self._line(f"  {trial_line(trial_seconds(run))}")

    def _line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
