"""A run as Markdown, for an issue or a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ladder.report.run_data import ReportedRun
from ladder.report.summary import (
    answer_figures,
    answer_sentence,
    cautions,
    comparison,
    introduction,
    recipe_sentence,
    remedy_sentence,
)
from ladder.report.table import rows
from ladder.report.times import total_line


def markdown(runs: Sequence[ReportedRun]) -> str:
    """Each run with its answer and measurements; several runs begin with a table that compares them."""
    parts = [_compared(runs)] if len(runs) > 1 else []
    return "\n\n".join([*parts, *(_run(run) for run in runs)]) + "\n"


def _compared(runs: Sequence[ReportedRun]) -> str:
    body = [[row["name"], *row["values"]] for row in comparison(runs)]
    return _table(["", *(run.name for run in runs)], body)


def _run(run: ReportedRun) -> str:
    words = introduction(run)
    answer = f"**{_escaped(run.best.candidate_key)}** — {answer_sentence(run)}" if run.best else "Nothing fits so far."
    said = [*answer_figures(run), *(("Warning", caution) for caution in cautions(run))]
    figures = "\n".join(f"- {_escaped(name)}: {_escaped(value)}" for name, value in said)
    header = ["rung", "ckpt", "micro-batch", "outcome", "tokens/s", "proof", f"GiB per {run.rank_word}", "trial", "why"]
    tried = sorted(
        (row for row in rows(run.entries, run.trial_seconds) if row["trial"]),
        key=lambda row: -(row["tokens_per_second"] or 0.0),
    )
    body = [
        [
            row["rung"],
            row["checkpointing"],
            row["micro_batch"],
            row["outcome"] if row["status"] != "answer" else "answer",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            f"{row['proof_tokens_per_second']:,.0f}" if row["proof_tokens_per_second"] else "",
            f"{row['peak_device_gib']:.2f}" if row["peak_device_gib"] is not None else "",
            row["trial"],
            row["why"],
        ]
        for row in tried
    ]
    heading = f"## {_escaped(words['model'])} on {_escaped(words['where'])}"
    comparison_or_remedy = _escaped(recipe_sentence(run) or remedy_sentence(run))
    parts = [heading, _escaped(words["about"]), answer, comparison_or_remedy, figures, _table(header, body)]
    return "\n\n".join([part for part in parts if part] + [total_line(run.trial_seconds, on_paper=run.simulated)])


def _table(header: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(_escaped(each) for each in line)} |" for line in lines)


def _escaped(value: object) -> str:
    """`value` on one line with markup escaped, so that it cannot break its cell or heading."""
    text = " ".join(str(value).split())
    return "".join(f"\\{letter}" if letter in "|`*_<>[]\\" else letter for letter in text)
