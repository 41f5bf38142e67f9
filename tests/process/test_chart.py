"""The chart and the table of results in the README are those that scripts/chart.py makes of benchmarks/results."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import chart
import pytest


def test_drawing_and_writing_them_again_changes_nothing() -> None:
    found = chart.results()
    readme = chart.README.read_text("utf-8")
    assert chart.chart(found) == chart.CHART.read_text("utf-8")
    assert chart.with_table(readme, chart.table(found)) == readme


def test_the_chart_is_well_formed_and_loads_nothing() -> None:
    picture = chart.CHART.read_text("utf-8")
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert [word for word in ("<script", "href", "url(", "@import") if word in picture] == []


def test_a_sweep_that_skipped_a_step_of_the_recipe_has_no_first_fit() -> None:
    skipped = chart.RESULTS / "4xh200-llama-2-7b-40gib" / "trials.csv"  # predicts ZeRO-2 not to fit, and tries it not
    with pytest.raises(ValueError, match="zero0 was not measured"):
        chart.first_fit(skipped)
