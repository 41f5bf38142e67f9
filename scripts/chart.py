"""Draw docs/first-fit.svg and write the README's table of results: `python scripts/chart.py`.

Both compare the answer of a tune with the first configuration that the documented recipe finds to fit. All figures come
from benchmarks/results, where first-fit.json names the files of each tune.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CASES = RESULTS / "first-fit.json"
CHART = ROOT / "docs" / "first-fit.svg"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: written by scripts/chart.py -->\n", "<!-- end of results -->\n"

# A person who follows the recipe tries these at micro-batch 1 with checkpointing, and stops at the first that fits. The
# first one is tried without checkpointing too, which never fitted where it did not fit with it.
RECIPE = ("zero0", "zero1", "zero2", "zero2+opt-cpu", "zero3", "zero3+param-cpu", "zero3+param-cpu+opt-cpu")

WIDTH, LEFT, RIGHT, TOP = 760, 150, 140, 78
BAR, GAP, BETWEEN = 22, 4, 26
STYLE = """\
    .paper { fill: #ffffff; }
    text { fill: #1f2328; font: 14px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
    .title { font-size: 16px; font-weight: 600; }
    .small { fill: #59636e; font-size: 12px; }
    .first { fill: #8c959f; }
    .answer { fill: #1a7f37; }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117; }
      text { fill: #f0f6fc; }
      .small { fill: #9198a1; }
      .first { fill: #6e7681; }
      .answer { fill: #3fb950; }
    }
"""


@dataclass(frozen=True)
class Candidate:
    """A rung, its micro-batch and checkpointing, and how fast it trained."""

    rung: str
    checkpointing: bool
    micro_batch: int
    tokens_per_second: float

    def __str__(self) -> str:
        checkpointing = "on" if self.checkpointing else "off"
        return f"`{self.rung}` ckpt={checkpointing} mb={self.micro_batch}: {self.tokens_per_second:,.0f}"

    @property
    def brief(self) -> str:
        """Without what all steps of the recipe share."""
        return f"`{self.rung}`: {self.tokens_per_second:,.0f}"


@dataclass(frozen=True)
class Result:
    """One tune: what the recipe would have stopped at, and what the tune answered."""

    model: str
    gpus: int
    gpu: str
    limit: float
    """GiB a GPU."""
    first_fit: Candidate
    answer: Candidate
    seconds: int
    """From the start of the tune to the proven answer."""

    @property
    def gain(self) -> float:
        return self.answer.tokens_per_second / self.first_fit.tokens_per_second


def first_fit(path: Path) -> Candidate:
    """The first step of the recipe that was measured to fit. A step before it must have been measured not to."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = {
            row["rung"]: row
            for row in csv.DictReader(file)
            if row["micro_batch"] in ("1", "1.0")
            and (row.get("checkpointing") or row["gradient_checkpointing"]) in ("on", "True")
        }
    for rung in RECIPE:
        if rows[rung]["status"] not in ("measured", "answer"):
            raise ValueError(f"{path}: {rung} was not measured at micro-batch 1 with checkpointing")
        if rows[rung]["outcome"] in ("fits", "answer"):
            return Candidate(rung, True, 1, float(rows[rung]["tokens_per_second"]))
    raise ValueError(f"{path}: no step of the recipe fits")


def seconds(printed: str) -> int:
    """How long the tune took: the whole command where that was timed, otherwise what the tune says of itself."""
    found = re.search(r"^wall (\d+) s$", printed, re.MULTILINE) or re.search(
        r"^Stopped: .*?; (\d+) s\b", printed, re.MULTILINE
    )
    if found is None:
        raise ValueError("no seconds in what the tune printed")
    return int(found.group(1))


def results() -> list[Result]:
    found = []
    for case in json.loads(CASES.read_text("utf-8")):
        answer = json.loads((RESULTS / case["answer"]).read_text("utf-8"))["ladder"]
        found.append(
            Result(
                model=case["model"],
                gpus=answer["world_size"],
                gpu=answer["gpu"].removeprefix("NVIDIA "),
                limit=answer["memory_per_gpu"]["limit_gib"],
                first_fit=first_fit(RESULTS / case["first_fit"]),
                answer=Candidate(
                    answer["engine"],
                    answer["gradient_checkpointing"],
                    answer["micro_batch"],
                    answer["tokens_per_second"],
                ),
                seconds=seconds((RESULTS / case["printed"]).read_text("utf-8")),
            )
        )
    return found


def table(found: list[Result]) -> str:
    lines = [
        "| model | GPUs | memory limit each | first fit, tokens/s | answer, tokens/s | gain | tune took |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {each.model} | {each.gpus} × {each.gpu} | {each.limit:.0f} GiB "
            f"| {each.first_fit.brief} | {each.answer} | {each.gain:.1f}× | {each.seconds} s |"
            for each in found
        ),
    ]
    return "\n".join(lines) + "\n"


def chart(found: list[Result]) -> str:
    largest = max(each.answer.tokens_per_second for each in found)
    step = 2 * BAR + GAP + BETWEEN
    height = TOP + step * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        '  <title id="title">Tokens per second of the first configuration that fits and of the answer</title>',
        f"  <style>\n{STYLE}  </style>",
        f'  <rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
        '  <text class="title" x="16" y="28">Tokens per second: the first fit and the answer</text>',
        '  <rect class="first" x="16" y="43" width="12" height="12"/>',
        '  <text class="small" x="34" y="53">the recipe’s first fit</text>',
        '  <rect class="answer" x="166" y="43" width="12" height="12"/>',
        '  <text class="small" x="184" y="53">the answer of ladder</text>',
    ]
    for index, each in enumerate(found):
        top = TOP + index * step
        parts += [
            f'  <text x="16" y="{top + 19}">{each.model}</text>',
            f'  <text class="small" x="16" y="{top + 37}">{each.gpus} × {each.gpu}, {each.limit:.0f} GiB</text>',
        ]
        for kind, candidate, note in (
            ("first", each.first_fit, ""),
            ("answer", each.answer, f" ({each.gain:.1f}×)"),
        ):
            y = top + (BAR + GAP if kind == "answer" else 0)
            width = round((WIDTH - LEFT - RIGHT) * candidate.tokens_per_second / largest, 1)
            parts += [
                f'  <rect class="{kind}" x="{LEFT}" y="{y}" width="{width}" height="{BAR}" rx="2"/>',
                f'  <text x="{LEFT + width + 6:.1f}" y="{y + 16}">{candidate.tokens_per_second:,.0f}{note}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def with_table(readme: str, written: str) -> str:
    """The README with `written` between its markers."""
    return between(readme, BEGIN, written, END, "README.md lacks the markers of the results")


def between(page: str, begin: str, written: str, end: str, without: str) -> str:
    """`page` with `written` between two marking lines. ValueError, which says `without`, if one is missing."""
    before, found, rest = page.partition(begin)
    _, found_too, after = rest.partition(end)
    if not found or not found_too:
        raise ValueError(without)
    return f"{before}{begin}\n{written}\n{end}{after}"


def main() -> None:
    found = results()
    CHART.write_text(chart(found), "utf-8")
    README.write_text(with_table(README.read_text("utf-8"), table(found)), "utf-8")
    print(f"Wrote {CHART} and the table in {README}")


if __name__ == "__main__":
    main()
