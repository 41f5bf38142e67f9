"""What ranks print is theirs alone: it fills no disk and drives no terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.provocation import FaultyBench, Once, a_step_of, outcome_of, records_of
from helpers import tiny_trial

from ladder.events.protocol import FailedEvent
from ladder.events.step_policy import StepPolicy
from ladder.tuning.tune_events import TrialEnds
from ladder.tuning.watch.plain import plain_lines
from ladder.units import MIB

PRINTED_BYTES = 96 * MIB


def test_a_rank_that_prints_without_end_keeps_a_short_log_and_its_measurement(
    bench: FaultyBench, tmp_path: Path
) -> None:
    log = tmp_path / "0001" / "rank1.log"
    printing = Once(bench, a_step_of(1), lambda: bench.provoke(bench.rank(1), "print_a_lot"))
    run = bench.run(tiny_trial(log.parent, 1, steps=StepPolicy(minimum=20, maximum=20)), printing)
    assert int(bench.provoke.happened()[0]) >= PRINTED_BYTES
    assert [record.outcome.kind for record in records_of(run)] == ["fits"]
    assert log.read_bytes().startswith(b"ladder: ")  # the beginning is kept
    assert b"\x1b[2J" in log.read_bytes()
    assert log.stat().st_size <= 17 * MIB < PRINTED_BYTES


def test_a_hostile_message_reaches_the_terminal_as_text_only(
    bench: FaultyBench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = 1
    fail = Once(bench, a_step_of(rank), lambda: bench.provoke(bench.rank(rank), "raise_hostile_text"))
    run = bench.run(tiny_trial(tmp_path / "0001", 1, steps=StepPolicy(minimum=100_000, maximum=100_000)), fail)
    (failure,) = [event for event in run.events[rank] if isinstance(event, FailedEvent)]
    assert "\x1b]0;owned\x07" in failure.message
    outcome = outcome_of(run)
    assert (outcome.kind, outcome.rank) == ("crash", rank)
    capfd.readouterr()
    plain_lines(TrialEnds(run, records_of(run)))
    shown = capfd.readouterr().err
    assert r"RuntimeError: \x1b[31m\x1b]0;owned\x07[/bold]" in shown
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert shown.count("\n") == 2  # the outcome and the times: a message adds no line
