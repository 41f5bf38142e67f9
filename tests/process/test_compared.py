"""The tables beside what people use today are those that scripts/compared.py makes of benchmarks/results/compare."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import compare
import compared
import compared_chart
import pytest
from ways import WAYS, WAYS_OF_A_SCRIPT

HOST = "1 x NVIDIA H200 (GPU-1)"


def test_writing_the_tables_again_changes_nothing() -> None:
    for file, tables in compared.tables().items():
        page = file.read_text("utf-8")
        assert compared.with_tables(page, tables) == page


def test_drawing_the_picture_again_changes_nothing_and_it_loads_nothing() -> None:
    picture = compared_chart.CHART.read_text("utf-8")
    assert compared_chart.picture(compared.live_rows(), compared.LIVE) == picture
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert [word for word in ("<script", "href", "url(", "@import") if word in picture] == []


def test_every_way_that_was_recorded_has_a_line() -> None:
    rows = json.loads((compared.RESULTS / "ways.json").read_text("utf-8"))
    assert {row["way"] for row in rows} == set(compared.WAYS)


def test_every_live_row_and_way_of_gpus_has_words_for_the_table() -> None:
    assert set(compared.LIVE) == {name for name in compare.ROWS if not name.startswith("cpu")}
    assert set(compared.LIVE_WAYS) == set(WAYS)
    for row in compared.LIVE:
        expected = WAYS_OF_A_SCRIPT if compare.ROWS[row].is_script else WAYS
        left_out = set() if row in compared.UNCHECKED else {"ladder unchecked"}
        assert set(compared.ways_of(row)) == set(expected) - left_out


def test_repetitions_share_a_line_that_shows_how_far_they_are_apart() -> None:
    common = {"row": "sft", "host": HOST, "answer": {"micro_batch": 8}, "steps": 50, "headroom": 0.5, "why": None}
    rows = [
        common | {"way": way, "repetition": each, "tokens_per_second": speed, "gpu_seconds": 9.6, "failures": each}
        for way, each, speed in (("ladder", 1, 1000.0), ("ladder", 2, 1100.0), ("trainer", 1, 900.0), ("trainer", 2, 0))
    ]
    rows[-1]["why"] = "out of memory"
    ladder, trainer = compared.live_table(rows).splitlines()[2:]
    assert ladder.endswith("| 8 | 1,000 to 1,100 | 1.00 | 10 | 1 to 2 | 50 | 50% |")
    assert trainer.endswith("| 8 | 900; its training failed: out of memory | 0.90 | 10 | 1 to 2 | 50 | 50% |")


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markers of ways"):
        compared.with_tables("no marker", {"ways": ""})
