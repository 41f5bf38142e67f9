"""report.html: one file that contains everything and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ladder import __version__
from ladder.report.charts import Chart
from ladder.report.figures import memory_by_part
from ladder.report.page.svg import svg
from ladder.report.run_data import ANSWER_NAME, ReportedRun
from ladder.report.speed_figure import speed_against_memory, speed_over_time
from ladder.report.summary import (
    answer_figures,
    answer_sentence,
    cautions,
    comparison,
    environment,
    introduction,
    recipe_sentence,
    remedy_sentence,
    usage,
)
from ladder.report.table import rows
from ladder.report.times import total_line
from ladder.search.belief import LIKELY

_COLUMNS = (
    ("rung", "rung", "rung"),
    ("checkpointing", "ckpt", "short"),
    ("micro_batch", "mb", "number"),
    ("accumulation", "acc.", "number"),
    ("outcome", "outcome", "short"),
    ("tokens_per_second", "tokens/s", "number"),
    ("proof_tokens_per_second", "proof", "number"),
    ("step_seconds", "step, s", "number"),
    ("peak_device_gib", "GiB", "number"),
    ("host_gib", "host GiB", "number"),
    ("trial", "trial", "short"),
    ("why", "why", "why"),
)
_PREDICTED = {"tokens_per_second": "predicted_tokens_per_second", "peak_device_gib": "predicted_device_gib"}
_DIGITS = {
    "tokens_per_second": ",.0f",
    "proof_tokens_per_second": ",.0f",
    "peak_device_gib": ",.2f",
    "host_gib": ",.1f",
    "step_seconds": ",.3g",
}


def html(runs: Sequence[ReportedRun]) -> str:
    """The report of one run, or of several compared."""
    return _template().render(
        css=_asset("report.css"),
        js=_asset("report.js"),
        version=__version__,
        title=f"ladder: {', '.join(run.space.workload.model.name for run in runs)}",
        runs=[_page_of(run, f"run{number}") for number, run in enumerate(runs)],
        comparison=comparison(runs) if len(runs) > 1 else [],
        columns=[{"title": title, "number": kind == "number"} for _, title, kind in _COLUMNS],
    )


@cache
def _template() -> Template:
    """The page's template, compiled once."""
    loader = PackageLoader("ladder.report", "page")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("report.html.j2")


def compile_template() -> None:
    """Do now what would otherwise take time when the first page is made."""
    _template()


_SPEED = (
    "Every candidate, as its trial measured it or as it is predicted. Bars show how far a figure may be off: half the "
    "interquartile range of the measured steps, or the 80% range of a prediction. The dashed line is the memory limit."
)
_ORDER = (
    "Each trial and proof where it ended, without the seconds between them. Bars show half the interquartile range of "
    "the measured steps. The dotted line is the fastest that was proven so far."
)
_MEMORY = (
    "The answer and the best candidate of each engine: memory as predicted before any trial, and as measured in the "
    "trial and the proof."
)


def _figure_of(name: str, heading: str, caption: str, chart: Chart | None) -> dict[str, Any] | None:
    """What the template draws of `chart`; None for none."""
    if chart is None:
        return None
    return {
        "id": name,
        "heading": heading,
        "caption": caption,
        "svg": svg(chart, heading),
        "legend": [(place, *entry) for place, entry in enumerate(chart.legend)],
    }


def _page_of(run: ReportedRun, name: str) -> dict[str, Any]:
    config = dict(run.config) if run.config is not None else None
    return {
        "id": name,
        "name": run.name,
        **introduction(run),
        "answer": {"key": run.best.candidate_key, "sentence": answer_sentence(run), "figures": answer_figures(run)}
        if run.best
        else None,
        "recipe": recipe_sentence(run).partition(" ("),
        "remedy": remedy_sentence(run),
        "warnings": cautions(run),
        "usage": _blocks(usage(config, (run.folder / ANSWER_NAME).absolute())) if config else [],
        "config_json": json.dumps(config, indent=2) if config else None,
        "speed": _figure_of(f"{name}-speed", "Speed against memory", _SPEED, speed_against_memory(run)),
        "figures": [
            _figure_of(f"{name}-order", "The tune over time", _ORDER, speed_over_time(run)),
            _figure_of(f"{name}-memory", "Memory by part", _MEMORY, memory_by_part(run)),
        ],
        "spent": total_line(run.trial_seconds, on_paper=run.simulated),
        "ledger": _ledger(run),
        "kinds": sorted({str(row["outcome"]) for row in rows(run.entries, {})}),
        "rank": run.rank_word,
        "environment": environment(run),
        "command": run.about.get("command"),
    }


def _blocks(usage: str) -> list[dict[str, str]]:
    """The commands of `usage`, each with the comment before it."""
    blocks: list[dict[str, str]] = []
    for line in usage.splitlines():
        if line.startswith("# "):
            blocks.append({"comment": line[2].upper() + line[3:], "command": ""})
        else:
            blocks[-1]["command"] += f"{line}\n"
    return [{**block, "command": block["command"].rstrip()} for block in blocks]


def _ledger(run: ReportedRun) -> list[dict[str, Any]]:
    """Rows: the answer, candidates that fit by speed, those that failed, and untried ones by predicted speed."""
    table = rows(run.entries, run.trial_seconds)
    table.sort(key=_place)
    return [
        {"kind": _kind(row), "outcome": row["outcome"], "cells": [_cell(row, name, kind) for name, _, kind in _COLUMNS]}
        for row in table
    ]


def _place(row: dict[str, Any]) -> tuple[bool, bool, float, bool, float]:
    speed, predicted = row["tokens_per_second"], row["predicted_tokens_per_second"] if _is_likely(row) else None
    return row["status"] != "answer", speed is None, -(speed or 0.0), not row["trial"], -(predicted or 0.0)


def _is_likely(row: dict[str, Any]) -> bool:
    """Whether an untried candidate is likely to fit; otherwise its predicted speed is not shown."""
    return row["predicted_fits"] is not None and row["predicted_fits"] >= LIKELY


def _kind(row: dict[str, Any]) -> str:
    if row["status"] == "answer":
        return "answer-row"
    return "untried" if row["status"] != "measured" else "" if row["outcome"] == "fits" else "failed"


def _cell(row: dict[str, Any], name: str, kind: str) -> dict[str, Any]:
    value, sign = row[name], ""
    if value is None and name in _PREDICTED and row["status"] == "predicted" and row[_PREDICTED[name]] is not None:
        value, sign = row[_PREDICTED[name]], "~"
    if value is None or (name == "tokens_per_second" and sign and not _is_likely(row)):
        return {"text": "", "kind": kind, "value": ""}
    if name == "outcome" and row["status"] == "answer":
        return {"text": "answer", "kind": kind, "value": None}
    if kind != "number":
        return {"text": str(value), "kind": kind, "value": None}
    return {"text": f"{sign}{value:{_DIGITS.get(name, '')}}", "kind": kind, "value": value}


def _asset(name: str) -> str:
    return (files("ladder.report") / "page" / name).read_text(encoding="utf-8")
