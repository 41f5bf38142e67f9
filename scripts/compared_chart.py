"""The picture of docs/explanation/side-by-side.md: speeds beside that of `ladder`, a row for each training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chart

CHART = chart.ROOT / "docs" / "side-by-side.svg"

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 790, 322, 40, 84, 34, 40
MOST = 1.2
"""The right end of the axis, in speeds of `ladder`. Chosen: the fastest other way so far has 1.18."""
STYLE = """\
    .axis { stroke: #d1d9e0; }
    .ours { stroke: #1a7f37; stroke-width: 3; }
    .hand { fill: #8c959f; }
    .finder { fill: #0969da; }
    .none { stroke: #cf222e; stroke-width: 2; }
    @media (prefers-color-scheme: dark) {
      .axis { stroke: #3d444d; }
      .ours { stroke: #3fb950; }
      .finder { fill: #4493f8; }
      .none { stroke: #f85149; }
    }
"""
_BY_HAND = ("ddp", "fsdp2", "trainer")


def picture(rows: Sequence[dict[str, Any]], names: dict[str, str]) -> str:
    """The SVG of live records with `row` and those of `ladder` among them; `names` has the words of each training."""
    trainings = [name for name in names if any(row["row"] == name for row in rows)]
    height = TOP + ROW * len(trainings) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        '  <title id="title">Speed of the training after the answer, beside that after ladder’s</title>',
        f"  <style>\n{chart.STYLE}{STYLE}  </style>",
        f'  <rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
        '  <text class="title" x="16" y="28">Speed of the training after the answer; ladder’s is 1</text>',
        '  <line class="ours" x1="22" y1="42" x2="22" y2="58"/><text class="small" x="34" y="54">ladder</text>',
        '  <circle class="hand" cx="102" cy="50" r="6"/><text class="small" x="114" y="54">by hand</text>',
        '  <circle class="finder" cx="190" cy="50" r="6"/><text class="small" x="202" y="54">finders, Autotuner</text>',
        f"  {_cross(340, 50)}",
        '  <text class="small" x="352" y="54">no training (how many ways)</text>',
        '  <circle class="hand" cx="550" cy="50" r="6" fill-opacity="0.25"/>',
        '  <text class="small" x="562" y="54">pale: its search was cut off</text>',
    ]
    for tick in (0.0, 0.5, 1.0):
        x, bottom = _x(tick), TOP + ROW * len(trainings)
        parts.append(f'  <line class="axis" x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'  <text class="small" x="{x}" y="{bottom + 20}" text-anchor="middle">{tick:g}</text>')
    for index, name in enumerate(trainings):
        parts += _row([row for row in rows if row["row"] == name], names[name], TOP + ROW * index + ROW // 2)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(rows: Sequence[dict[str, Any]], name: str, y: int) -> list[str]:
    """A training: `ladder`'s line, a dot for each other way, and how many of them trained nothing."""
    ours = {run_of(row): row["tokens_per_second"] for row in rows if row["way"] == "ladder"}
    first, _, more = name.partition(", ")
    parts = [f'  <text x="16" y="{y - 1}">{first}</text>', f'  <text class="small" x="16" y="{y + 13}">{more}</text>']
    others = [row for row in rows if not row["way"].startswith("ladder")]
    for row in sorted(others, key=lambda each: each["way"] not in _BY_HAND):
        if row["tokens_per_second"] and run_of(row) in ours:
            kind = "hand" if row["way"] in _BY_HAND else "finder"
            x = _x(row["tokens_per_second"] / ours[run_of(row)])
            opacity = 0.25 if row.get("finished") is False else 0.75
            parts.append(f'  <circle class="{kind}" cx="{x}" cy="{y}" r="6" fill-opacity="{opacity}"/>')
    trained = {row["way"] for row in others if row["tokens_per_second"]}
    if nothing := len({row["way"] for row in others} - trained):
        parts += [f"  {_cross(LEFT, y)}", f'  <text class="small" x="{LEFT + 10}" y="{y + 4}">{nothing}</text>']
    if ours:
        parts.append(f'  <line class="ours" x1="{_x(1)}" y1="{y - 11}" x2="{_x(1)}" y2="{y + 11}"/>')
    return parts


def run_of(row: dict[str, Any]) -> tuple[str, int]:
    """What a row may be compared with: the same training in the same repetition, which is all on one host."""
    return row["row"], row["repetition"]


def _x(share: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * min(share, MOST) / MOST, 1)


def _cross(x: float, y: float) -> str:
    return f'<path class="none" d="M{x - 5} {y - 5}l10 10M{x - 5} {y + 5}l10 -10"/>'
