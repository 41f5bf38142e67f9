"""report.html: one file with everything in it, that nothing is loaded into from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ladder import __version__
from ladder.errors import EnvironmentFaultError
from ladder.report.figures import answers_compared, memory_by_part, speed_against_memory, step_time, time_by_trial
from ladder.report.run_data import ANSWER_NAME, ReportedRun
from ladder.report.summary import (
    answer_figures,
    answer_sentence,
    comparison,
    environment,
    introduction,
    usage,
)
from ladder.report.table import rows
from ladder.report.times import total_line
from ladder.search.space import warnings_of

_COLUMNS = (
    ("rung", "rung", "rung"),
    ("checkpointing", "ckpt", "short"),
    ("micro_batch", "mb", "number"),
    ("accumulation", "acc.", "number"),
    ("outcome", "outcome", "short"),
    ("tokens_per_second", "tokens/s", "number"),
    ("step_seconds", "step, s", "number"),
    ("peak_device_gib", "GiB", "number"),
    ("host_gib", "host GiB", "number"),
    ("trial", "trial", "short"),
    ("why", "why", "why"),
)
_PREDICTED = {"tokens_per_second": "predicted_tokens_per_second", "peak_device_gib": "predicted_device_gib"}
_DIGITS = {"tokens_per_second": ",.0f", "peak_device_gib": ",.2f", "host_gib": ",.1f", "step_seconds": ",.3g"}


def html(runs: Sequence[ReportedRun]) -> str:
    """The report of one run, or of several beside each other."""
    environment = Environment(
        loader=PackageLoader("ladder.report", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        title=f"ladder: {', '.join(run.space.workload.model.name for run in runs)}",
        runs=[_page_of(run, f"run{number}") for number, run in enumerate(runs)],
        comparison={"rows": comparison(runs), "figure": answers_compared(runs)} if len(runs) > 1 else None,
        columns=[{"title": title, "number": kind == "number"} for _, title, kind in _COLUMNS],
        css=_asset("report.css"),
        js=_asset("report.js"),
        plotly=_plotly(),
        version=__version__,
    )


def _page_of(run: ReportedRun, name: str) -> dict[str, Any]:
    config = dict(run.config) if run.config is not None else None
    return {
        "id": name,
        "name": run.name,
        **introduction(run),
        "answer": {"key": run.best.candidate_key, "sentence": answer_sentence(run), "figures": answer_figures(run)}
        if run.best
        else None,
        "warnings": warnings_of(run.best, run.space) if run.best else (),
        "usage": usage(config, (run.folder / ANSWER_NAME).absolute()) if config else "",
        "config_json": json.dumps(config, indent=2) if config else None,
        "speed": speed_against_memory(run),
        "memory": memory_by_part(run),
        "step": step_time(run),
        "time": time_by_trial(run),
        "time_sentence": total_line(run.trial_seconds, on_paper=run.simulated),
        "ledger": _ledger(run),
        "environment": environment(run),
    }


def _ledger(run: ReportedRun) -> list[dict[str, Any]]:
    """The fastest first, then what failed, then what was not tried."""
    table = rows(run.entries, run.trial_seconds)
    table.sort(key=lambda row: (row["tokens_per_second"] is None, -(row["tokens_per_second"] or 0.0), not row["trial"]))
    return [{"kind": _kind(row), "cells": [_cell(row, name, kind) for name, _, kind in _COLUMNS]} for row in table]


def _kind(row: dict[str, Any]) -> str:
    if row["status"] == "answer":
        return "answer-row"
    return "untried" if row["status"] != "measured" else "" if row["outcome"] == "fits" else "failed"


def _cell(row: dict[str, Any], name: str, kind: str) -> dict[str, Any]:
    value, sign = row[name], ""
    if value is None and name in _PREDICTED and row[_PREDICTED[name]] is not None:
        value, sign = row[_PREDICTED[name]], "~"
    if value is None:
        return {"text": "", "kind": kind, "value": ""}
    if name == "outcome" and row["status"] == "answer":
        return {"text": "answer", "kind": kind, "value": None}
    if kind != "number":
        return {"text": str(value), "kind": kind, "value": None}
    return {"text": f"{sign}{value:{_DIGITS.get(name, '')}}", "kind": kind, "value": value}


def _asset(name: str) -> str:
    return (files("ladder.report") / "page" / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly.js as its package ships it, safe inside a script element."""
    script = files("plotly") / "package_data" / "plotly.min.js"
    try:
        text = script.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise EnvironmentFaultError(
            "report.html cannot be made: plotly is installed without its plotly.min.js; "
            "`pip install --force-reinstall plotly`, then `ladder report` makes it."
        ) from None
    return re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE)
