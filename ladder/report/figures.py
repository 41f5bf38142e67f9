"""The figures of a report as plain data for plotly.js; the page adds the theme.

Each function returns {"data": [...], "layout": {...}} or None where there is nothing to draw. Texts are escaped: plotly
takes a subset of HTML in them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

from ladder.events.outcome import Record
from ladder.report.run_data import ReportedRun
from ladder.report.times import PHASES
from ladder.search.belief import believe
from ladder.search.ledger import Entry
from ladder.search.space import failed_in_setup, measured
from ladder.units import gib

Figure = dict[str, Any]

# Told apart by people with any colour vision (Okabe and Ito), on white and on black.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a000", "#8c6bb1", "#7f7f7f")
_FAILED = "#d62728"
_OUTSIDE = "outside PyTorch"
_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "outside_torch": _OUTSIDE,
}
_BAR_PIXELS = 38


def speed_against_memory(run: ReportedRun) -> Figure | None:
    """Every candidate: what fits in its rung's colour, what ran out as a cross, what is only predicted as a ring."""
    limit = gib(run.space.memory_limit) or 0.0
    most = 1.35 * limit
    data = [trace for name, shown in _by_rung(run).items() if (trace := _fitting(name, shown, run)) is not None]
    failed = [entry for entry in run.entries if entry.record and entry.record.outcome.kind == "gpu_oom"]
    if failed:
        data.append(_ran_out(failed, run, most))
    predicted = [entry for entry in run.entries if entry.predicted and (gib(entry.predicted.peak) or 0.0) < most]
    if predicted:
        data.append(_predicted(predicted))
    if not data:
        return None
    layout = {
        "xaxis": {"title": {"text": "memory of the fullest GPU, GiB"}, "range": [0, most]},
        "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"},
        "shapes": [_vertical(limit)],
        "annotations": [{"x": limit, "y": 1, "yref": "paper", "text": "limit", "showarrow": False, "xanchor": "left"}],
        "height": 460,
    }
    return {"data": data, "layout": layout}


def memory_by_part(run: ReportedRun) -> Figure | None:
    """For each rung the candidate that came furthest: what was predicted before any trial, beside what was measured."""
    prior = believe(run.space, ())
    shown = {key: record for key, record in _furthest(run).items() if record.measurement or record.outcome.bytes_asked}
    if not shown:
        return None
    outlooks = {key: prior.outlook(run.space.by_key[key]) for key in shown}
    labels = {key: _label(key) for key in shown}
    data = [
        _stack(
            text,
            [(gib(getattr(outlooks[key].memory.parts, part)), labels[key], "predicted") for key in shown],
            colour,
        )
        for (part, text), colour in zip(_PARTS.items(), _COLOURS, strict=False)
    ]
    data += _measured_parts(shown, labels, run)
    limit = gib(run.space.memory_limit) or 0.0
    layout = _bars(2 * len(shown), "GiB of one GPU") | {"shapes": [_vertical(limit)]}
    order = [_with(label, which) for label in labels.values() for which in ("predicted", "measured")]
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": order}
    return {"data": data, "layout": layout}


def step_time(run: ReportedRun) -> Figure | None:
    """Each rung's fastest: what its micro-steps take of an optimizer step, and what only the last one does."""
    fitting = {key: record for key, record in _furthest(run).items() if record.measurement}
    if not fitting:
        return None
    micro, update = [], []
    for key, record in fitting.items():
        seen, accumulation = record.measurement, run.space.by_key[key].accumulation
        assert seen is not None
        micro_step = seen.accumulate_seconds if accumulation > 1 else None
        whole = seen.step_seconds(accumulation)
        passes = whole if micro_step is None else accumulation * micro_step
        micro.append((passes, _label(key), ""))
        update.append((max(0.0, whole - passes), _label(key), ""))
    data = [
        _stack("forward and backward (all of it where nothing accumulates)", micro, _COLOURS[0], "s"),
        _stack("what only the optimizer step does", update, _COLOURS[1], "s"),
    ]
    return {"data": data, "layout": _bars(len(fitting), "seconds of an optimizer step")}


def time_by_trial(run: ReportedRun) -> Figure | None:
    """Where the tune's time went."""
    if not run.trial_seconds:
        return None
    labels = {name: f"{name} {_what(name, run)}" for name in sorted(run.trial_seconds)}
    data = [
        _stack(
            text, [(run.trial_seconds[name].get(phase, 0.0), label, "") for name, label in labels.items()], colour, "s"
        )
        for (phase, text), colour in zip(PHASES.items(), _COLOURS, strict=True)
        if any(seconds.get(phase, 0.0) >= 0.05 for seconds in run.trial_seconds.values())
    ]
    return {"data": data, "layout": _bars(len(labels), "seconds")}


def answers_compared(runs: Sequence[ReportedRun]) -> Figure | None:
    """The best of several runs beside each other."""
    best = [(run, run.best) for run in runs if run.best is not None]
    if not best:
        return None
    bars = [
        (record.tokens_per_second, f"{escape(run.name)}<br>{escape(record.candidate_key)}", "") for run, record in best
    ]
    return {"data": [_stack("tokens/s", bars, _COLOURS[0], "tokens/s")], "layout": _bars(len(best), "tokens/s")}


def _by_rung(run: ReportedRun) -> dict[str, list[Entry]]:
    rungs: dict[str, list[Entry]] = {}
    for entry in run.entries:
        rungs.setdefault(entry.rung, []).append(entry)
    return rungs


def _fitting(name: str, entries: Sequence[Entry], run: ReportedRun) -> Figure | None:
    points = [(entry, entry.record) for entry in entries if entry.record and entry.record.measurement]
    if not points:
        return None
    place = list(_by_rung(run)).index(name)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(name),
        "x": [gib(record.measurement.peak_device) for _, record in points if record.measurement],
        "y": [record.tokens_per_second for _, record in points],
        "text": [f"{_variant(entry)}<br>{_wrapped(entry.why)}" for entry, _ in points],
        "hovertemplate": "%{text}<br>%{y:,.0f} tokens/s, %{x:.2f} GiB",
        "marker": {
            "color": _COLOURS[place % len(_COLOURS)],
            "size": [18 if entry.status == "answer" else 10 for entry, _ in points],
            "opacity": 1,
            "symbol": ["star" if entry.status == "answer" else "circle" for entry, _ in points],
        },
    }


def _ran_out(entries: Sequence[Entry], run: ReportedRun, most: float) -> Figure:
    """At the memory they would have needed at least; their speed is what is predicted."""
    belief = believe(run.space, run.records)
    outlooks = [belief.outlook(run.space.by_key[entry.candidate_key or ""]) for entry in entries]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "ran out of memory",
        "x": [min(most, _needed(entry.record, run)) for entry in entries if entry.record],
        "y": [outlook.speed.tokens_per_second for outlook in outlooks],
        "text": [f"{_variant(entry)}<br>{_wrapped(entry.why)}" for entry in entries],
        "hovertemplate": "%{text}<br>at least %{x:.2f} GiB; %{y:,.0f} tokens/s predicted",
        "marker": {"color": _FAILED, "size": 9, "symbol": "x"},
    }


def _predicted(entries: Sequence[Entry]) -> Figure:
    known = [(entry, entry.predicted) for entry in entries if entry.predicted]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "predicted, not tried",
        "x": [gib(predicted.peak) for _, predicted in known],
        "y": [predicted.tokens_per_second for _, predicted in known],
        "text": [f"{_variant(entry)}<br>{_wrapped(entry.why)}" for entry, _ in known],
        "hovertemplate": "%{text}",
        "marker": {"color": "#8a8a8a", "size": 8, "symbol": "circle-open"},
    }


def _needed(record: Record, run: ReportedRun) -> float:
    missing = max(0, (record.outcome.bytes_asked or 0) - (record.outcome.bytes_free or 0))
    return gib(run.space.memory_limit + missing) or 0.0


def _furthest(run: ReportedRun) -> dict[str, Record]:
    """By engine's place: its fastest candidate that fits, else the last one that ran out while it trained."""
    tried = measured(run.records)
    chosen: dict[str, Record] = {}
    for engine in run.space.engines:
        own = [tried[each.key] for each in run.space.of_engine(engine) if each.key in tried]
        fits = [record for record in own if record.measurement]
        failed = [record for record in own if record.outcome.kind == "gpu_oom" and not failed_in_setup(record.outcome)]
        best = max(fits, key=lambda record: record.tokens_per_second or 0.0) if fits else next(iter(failed), None)
        if best is not None:
            chosen[best.candidate_key] = best
    return chosen


def _measured_parts(shown: dict[str, Record], labels: dict[str, str], run: ReportedRun) -> list[Figure]:
    allocated, reserved, outside, missing = [], [], [], []
    for key, record in shown.items():
        seen = record.measurement
        if seen is None:
            missing.append((_needed(record, run), labels[key], "measured"))
            continue
        allocated.append((gib(seen.peak_allocated), labels[key], "measured"))
        reserved.append((gib(max(0, seen.peak_reserved - seen.peak_allocated)), labels[key], "measured"))
        outside.append((gib(max(0, seen.peak_device - seen.peak_reserved)), labels[key], "measured"))
    stacks = (
        ("measured: allocated", allocated, "#595959"),
        ("measured: reserved beyond that", reserved, "#8c8c8c"),
        (_OUTSIDE, outside, _COLOURS[6]),
        ("measured: ran out, needs at least", missing, _FAILED),
    )
    drawn = [_stack(text, bars, colour) for text, bars, colour in stacks if bars]
    # The predicted bars' legend has that colour already.
    return [trace | {"showlegend": trace["name"] != _OUTSIDE} for trace in drawn]


def _stack(name: str, bars: Sequence[tuple[float | None, str, str]], colour: str, unit: str = "GiB") -> Figure:
    """One part of horizontal stacked bars; each bar is (length, label, second label or nothing)."""
    labels = [_with(label, second) for _, label, second in bars]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": [length for length, _, _ in bars],
        "y": labels,
        "marker": {"color": colour},
        "hovertemplate": f"%{{x:,.3~f}} {unit}",
    }


def _bars(number: int, title: str) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "xaxis": {"title": {"text": title}},
        "yaxis": {"autorange": "reversed", "automargin": True, "categoryorder": "trace"},
        "height": 90 + _BAR_PIXELS * number,
        "bargap": 0.3,
    }


def _vertical(x: float) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": _FAILED, "width": 2, "dash": "dash"},
    }


def _what(trial: str, run: ReportedRun) -> str:
    records = [record for record in run.records if record.trial == trial]
    if not records:
        return "losses compared"
    if records[0].purpose == "proof":
        return f"proof of {_label(records[0].candidate_key)}"
    engine = escape(run.space.by_key[records[0].candidate_key].engine.key)
    return f"probe of<br>{engine}" if records[0].purpose == "probe" else f"<br>{engine}"


def _label(key: str) -> str:
    """A candidate for an axis: long rungs in two lines."""
    rung, _, variant = key.partition(" ")
    return f"{escape(rung)}<br>{escape(variant)}"


def _with(label: str, second: str) -> str:
    return f"{label} <i>{second}</i>" if second else label


def _variant(entry: Entry) -> str:
    return f"<b>{escape(entry.candidate_key or entry.rung)}</b>"


def _wrapped(text: str, width: int = 60) -> str:
    return "<br>".join(textwrap.wrap(escape(text), width))
