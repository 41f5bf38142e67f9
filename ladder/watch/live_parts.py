"""The parts of the live view, each made from the progress so far for a width in columns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from ladder.events.outcome import Record
from ladder.report.table import RUNG_CELLS
from ladder.report.times import PHASES, clock
from ladder.search.space import Space
from ladder.text import shown
from ladder.units import format_bytes, gib
from ladder.watch.plain import engine_key_of
from ladder.watch.progress import CurrentTrial, Progress

_NARROW = 72
"""Columns of a terminal; with fewer, the table leaves memory out. Chosen by eye."""
_WIDE = 100
"""Columns of a terminal; with at least this many, the memory of every GPU is shown. Chosen by eye."""
_BAR_CELLS = 12
"""Chosen by eye."""
_MOST_COLUMNS = 16
"""The most GPUs that are shown one by one. Chosen: two usual hosts have as many, and they fit on the line."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"


def ladder_table(progress: Progress, width: int, height: int) -> Table:
    """What was measured by engine, in the documented order, in at most about `height` lines."""
    space = progress.space
    assert space is not None
    narrow, wide = width < _NARROW, width >= _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("rung", no_wrap=not narrow, overflow="fold", max_width=RUNG_CELLS if narrow else None)
    table.add_column("ck" if narrow else "ckpt", no_wrap=True)
    table.add_column("mb", justify="right", no_wrap=True)
    table.add_column("tok/s" if narrow else "tokens/s", justify="right", no_wrap=True)
    if not narrow:
        table.add_column(f" memory of {format_bytes(space.memory_limit)}", no_wrap=True)
    table.add_column("outcome", no_wrap=True, overflow="ellipsis")
    running = _running_engine(progress)
    best = progress.best
    for engine, records in _folded(progress.rows(), height - 1, running).items():
        for record in records:
            is_best = best is not None and record.candidate_key == best.candidate_key
            memory = [] if narrow else [_memory(record, progress, wide)]
            figures = _figures(record, space)
            outcome = "best" if narrow and is_best else _outcome(record, is_best)
            table.add_row(engine, *figures, *memory, outcome, style=_style(record, is_best))
        if not records or engine == running:
            state = Text("running", "cyan") if engine == running else Text("–", "dim")
            table.add_row(Text(engine, "cyan" if engine == running else "dim"), *[""] * (3 if narrow else 4), state)
    return table


def unsupported_line(progress: Progress) -> Text:
    """The rungs that cannot work on this machine; empty if all can."""
    names = ", ".join(rung.name for rung in progress.unsupported)
    return Text(f"not on this machine: {names}" if names else "", "dim")


def now_lines(progress: Progress, width: int) -> list[Text]:
    """What is running, and why."""
    trial = progress.trial
    if trial is None:
        return [Text("choosing the next trial", "dim")]
    seconds = clock(time.monotonic() - trial.began)
    seconds += f" of about {clock(trial.expected)}" if trial.expected and not progress.on_paper else ""
    name, what = (
        (f"{'proof' if trial.spec.proof else 'trial'} {trial.spec.trial} ", "bold cyan"),
        shown(_key(trial)),
    )
    phase = PHASES.get(trial.phase, trial.phase)
    if width < _NARROW:
        return [Text.assemble(name, f"{phase}, ", (seconds, "dim")), Text(what, "dim")]
    steps = f", micro-step {trial.num_steps}: {trial.step_seconds:.3g} s" if trial.step_seconds is not None else ""
    line = Text.assemble(name, f"{what} {phase}{_place(trial)}{steps}, ", (seconds, "dim"))
    return [line, Text(f"because {shown(trial.reason)}", "dim")]


def _key(trial: CurrentTrial) -> str:
    """The running candidate, or the engine if no candidate runs yet."""
    return trial.candidate or engine_key_of(trial.spec)


def _place(trial: CurrentTrial) -> str:
    number = next((place for place, each in enumerate(trial.spec.candidates, 1) if each.key == trial.candidate), None)
    several = number is not None and len(trial.spec.candidates) > 1
    return f" (candidate {number} of {len(trial.spec.candidates)})" if several else ""


def best_line(progress: Progress) -> Text:
    """The fastest candidate that fits so far, proven or not."""
    best = progress.best
    if best is None or best.measurement is None:
        return Text("nothing fits so far", "dim")
    proven = best.purpose == "proof"
    return Text.assemble(
        ("proven " if proven else "best so far ", "dim"),
        (best.candidate_key, "bold green"),
        f" {best.tokens_per_second or 0:,.0f} tokens/s {format_bytes(best.measurement.peak_device)}",
    )


def time_line(progress: Progress) -> Text:
    """The elapsed time, and the time left as the search estimates it."""
    now = time.monotonic()
    line = Text(f"{clock(now - progress.began)} elapsed")
    if progress.on_paper:
        return line.append("; no estimate of the time left, as trials are simulated")
    left = progress.left(now)
    if left is None:
        return line
    least, most = map(clock, left)
    if left[1] < 1:
        return line.append(", longer than expected" if progress.is_overdue(now) else ", almost done")
    return line.append(f", about {least} to {most} left" if least != most else f", about {most} left")


def _folded(rows: Mapping[str, list[Record]], height: int, running: str | None) -> dict[str, list[Record]]:
    """All records if there is room; otherwise each engine's fastest and last failure; otherwise one of these.

    If even that is too much, the last engines that were not tried are left out.
    """
    choices = (list, _fastest_and_failure, lambda records: _fastest_and_failure(records)[:1])
    for choose in choices:
        chosen = {engine: choose(records) for engine, records in rows.items()}
        if sum(max(1, len(records)) for records in chosen.values()) <= height:
            return chosen
    untried = [engine for engine, records in chosen.items() if not records and engine != running]
    left_out = untried[-(len(chosen) - height) :]
    return {engine: records for engine, records in chosen.items() if engine not in left_out}


def _fastest_and_failure(records: list[Record]) -> list[Record]:
    fitting = [record for record in records if record.outcome.kind == "fits"]
    failed = [record for record in records if record.outcome.kind != "fits"]
    return sorted(fitting, key=lambda record: -(record.tokens_per_second or 0.0))[:1] + failed[-1:]


def _figures(record: Record, space: Space) -> list[str]:
    candidate = space.by_key[record.candidate_key]
    speed = f"{record.tokens_per_second:,.0f}" if record.tokens_per_second else ""
    return [candidate.checkpointing, str(candidate.micro_batch), speed]


def _memory(record: Record, progress: Progress, wide: bool) -> Text:
    """The fullest GPU as a bar with its GiB, and every GPU as one character, relative to the limit."""
    assert progress.space is not None
    if record.measurement is None:
        return Text()
    limit = progress.space.memory_limit
    text = Text(" ") + _bar(record.measurement.peak_device / limit, _BAR_CELLS)
    text.append(f" {gib(record.measurement.peak_device):6.2f}")
    peaks = progress.peaks.get(record.candidate_key, ())
    if wide and 1 < len(peaks) <= _MOST_COLUMNS:
        text += Text(" ") + _columns([peak / limit for peak in peaks])
    return text


def _bar(fraction: float, width: int) -> Text:
    """A bar of `width` cells, of which `fraction` (0 to 1) is filled; all cells above 1."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Text(filled, _colour(fraction)) + Text("░" * (width - len(filled)), "dim")


def _columns(fractions: Sequence[float]) -> Text:
    """One character per GPU; its height shows how full the memory is."""
    text = Text()
    for fraction in fractions:
        height = round(min(1.0, max(0.0, fraction)) * (len(_HEIGHTS) - 1))
        text.append(_HEIGHTS[height], _colour(fraction))
    return text


def _colour(fraction: float) -> str:
    return "red" if fraction > 1 else "yellow" if fraction > 0.97 else "green"


def _outcome(record: Record, is_best: bool) -> str:
    if record.outcome.kind != "fits":
        return record.outcome.kind
    return "best so far" if is_best else "fits"


def _style(record: Record, is_best: bool) -> str:
    if record.outcome.kind != "fits":
        return "red"
    return "bold green" if is_best else ""


def _running_engine(progress: Progress) -> str | None:
    if progress.trial is None or progress.space is None or progress.trial.spec.proof:
        return None
    first = progress.space.by_key.get(progress.trial.spec.candidates[0].key)
    return first.engine.key if first else None
