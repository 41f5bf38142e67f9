"""The tables beside what people use today are those that scripts/compared.py makes of benchmarks/results/compare."""

from __future__ import annotations

import json

import compared
import pytest


def test_writing_the_tables_again_changes_nothing() -> None:
    page = compared.PAGE.read_text("utf-8")
    assert compared.with_tables(page) == page


def test_every_way_that_was_recorded_has_a_line() -> None:
    rows = json.loads((compared.RESULTS / "ways.json").read_text("utf-8"))
    assert {row["way"] for row in rows} == set(compared.WAYS)


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the markers of ways"):
        compared.with_tables("no marker")
