"""The tables say of every candidate what became of it, and why it lost."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from helpers import make_candidate, make_measurement, make_record
from rich.console import Console

from ladder.candidates import Candidate
from ladder.events.outcome import Record
from ladder.report.table import csv_text, frame, left_out, rows, terminal_table, unsupported_line
from ladder.search.ledger import Entry, Status
from ladder.units import GIB


def entry(
    candidate: Candidate, status: Status = "measured", record: Record | None = None, why: str = "fits", **changes: Any
) -> Entry:
    found = Entry(
        rung=candidate.engine.key,
        candidate_key=candidate.key,
        checkpointing=candidate.checkpointing,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        status=status,
        record=record,
        why=why,
    )
    return replace(found, **changes)


def unsupported(rung: str = "zero2+opt-cpu", why: str = "no compiler") -> Entry:
    unknown = dict.fromkeys(("candidate_key", "micro_batch", "accumulation")) | {"checkpointing": ""}
    return entry(make_candidate(rung), "unsupported", why=why, **unknown)


FAST, SLOW, LARGE = (make_candidate(micro_batch=size) for size in (4, 1, 8))
ENTRIES = [
    unsupported(),
    entry(LARGE, "pruned", why="ckpt=on mb=4 already ended in gpu_oom (trial 0001)"),
    entry(make_candidate("zero0"), record=make_record(make_candidate("zero0"), "gpu_oom"), why="rank 1 ran out"),
    entry(SLOW, record=make_record(SLOW, tokens_per_second=1000.0), why="50% slower than the answer"),
    entry(FAST, "answer", make_record(FAST, tokens_per_second=2000.04), "the fastest that fits"),
]


def shown(*entries: Entry, width: int = 200, most: int | None = None) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(terminal_table(entries, width, most))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_row_is_in_gib_seconds_and_tokens_per_second() -> None:
    measurement = make_measurement(watts=500.0, peak_device=3 * GIB // 2)
    record = make_record(FAST, measurement=measurement, tokens_per_second=2000.04, warnings=("one", "two"))
    (row,) = rows([entry(FAST, record=record)], {"0001": {"model": 1.5, "measure": 2.25}, "0002": {"model": 9.0}})
    assert row["peak_device_gib"] == 1.5
    assert row["tokens_per_second"] == 2000.0
    assert row["boundary_seconds"] == 2.0
    assert row["joules_per_token"] == pytest.approx(0.25, rel=1e-4)
    assert row["trial_seconds"] == 3.75
    assert row["warnings"] == "one; two"
    assert (row["outcome"], row["trial"], row["why"]) == ("fits", "0001", "fits")
    for row, outcome in zip(rows(ENTRIES[:3], {}), ("unsupported", "pruned", "gpu_oom"), strict=True):
        assert (row["outcome"], row["tokens_per_second"], row["peak_device_gib"]) == (outcome, None, None)


def test_trials_csv_is_what_pandas_would_write() -> None:
    measurement = make_measurement(watts=500.0)
    record = make_record(SLOW, measurement=measurement, tokens_per_second=1e16, warnings=('one, "two"', "three\nfour"))
    entries = [*ENTRIES, entry(SLOW, record=record, why="a, b")]
    text = csv_text(rows(entries, {}))
    assert text == frame(entries, {}).to_csv(index=False)
    again = pd.read_csv(io.StringIO(text), dtype={"micro_batch": str})
    assert list(again["why"]) == [item.why for item in entries]
    assert list(again["micro_batch"].dropna()) == [str(item.micro_batch) for item in entries if item.micro_batch]


def test_the_terminal_shows_the_answer_first_then_what_fits_then_failures_then_the_rest() -> None:
    lines = shown(*ENTRIES)
    assert [line.split()[0] for line in lines[1:]] == ["zero2", "zero2", "zero0", "zero2"]
    assert "2,000" in lines[1]
    assert "answer" in lines[1]
    assert "50% slower" in lines[2]
    assert "gpu_oom" in lines[3]
    same = [entry(make_candidate(micro_batch=size), "pruned", why="too large") for size in (2, 4, 8)]
    others = [entry(make_candidate(micro_batch=16), "pruned", why="other"), entry(LARGE, "pruned", why="too large")]
    assert len(shown(*same, *others)) == 1 + 2, "one reason is one line"


def test_rungs_that_cannot_work_here_are_one_line_below_the_table() -> None:
    others = [unsupported(rung, "no --nvme-path") for rung in ("zero3+opt-nvme", "zero3+param-nvme+opt-nvme")]
    line = "Unsupported: zero2+opt-cpu (no compiler); zero3+opt-nvme, zero3+param-nvme+opt-nvme (no --nvme-path)."
    assert unsupported_line([*ENTRIES, *others]) == line
    assert not any("nvme" in line for line in shown(*ENTRIES, *others))
    assert unsupported_line(ENTRIES[1:]) == ""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_proof_stands_beside_its_trial(width: int) -> None:
    proof = make_record(FAST, tokens_per_second=387.0, purpose="proof", trial="0002")
    proven = entry(FAST, "answer", make_record(FAST, tokens_per_second=792.0), proof=proof)
    head, line = shown(proven, width=width)
    assert "proof" in head
    assert line.split().index("387") == line.split().index("792") + 1
    assert rows([proven], {})[0]["proof_tokens_per_second"] == 387.0
    assert "proof" not in shown(*ENTRIES, width=width)[0]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_of_a_tune_fits_on_a_screen_and_says_what_it_leaves_out(width: int) -> None:
    sizes = range(1, 41)
    fits = [
        entry(make_candidate(micro_batch=size), record=make_record(FAST, tokens_per_second=float(size)))
        for size in sizes
    ]
    failed = [entry(make_candidate("zero0"), record=make_record(FAST, "gpu_oom"), why=f"{size}") for size in sizes]
    pruned = [entry(make_candidate("zero3"), "pruned", why=f"reason {size}") for size in sizes]
    everything = [ENTRIES[-1], *fits, *failed, *pruned, unsupported()]
    lines = shown(*everything, width=width, most=20)
    assert 20 <= len(lines) <= 1 + 20
    assert "2,000" in lines[1]  # the answer
    assert "40" in lines[2]  # the fastest
    assert [sum(line.startswith(rung) for line in lines) for rung in ("zero0", "zero3")] == [3, 6]
    said = left_out(everything, width, 20)
    hidden = len(everything) - 1 - (len(lines) - 1)  # one cannot work here, and the first line has the columns' names
    assert said == f"{hidden} more candidates not shown: `ladder explain` lists all, with their reasons."
    assert left_out(ENTRIES, width, 20) == ""


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_reason_is_on_every_screen_but_a_narrow_one(width: int) -> None:
    rung = "zero3+param-cpu+opt-cpu+lean"
    long = entry(make_candidate(rung, micro_batch=64), "pruned", why="needs 129.16 GiB of 24.00 GiB")
    lines = shown(long, ENTRIES[-1], width=width)
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(line.split()) for line in lines)
    assert "the fastest that fits" in words
    assert "needs 129.16 GiB of" in words


def test_a_reason_in_brackets_is_shown_as_it_is() -> None:
    line = shown(entry(FAST, why="failed: [bold]torch[/bold] said [/] and [1]"))[1]
    assert "[bold]torch[/bold] said [/] and [1]" in line
