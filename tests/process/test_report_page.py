"""report.html in a real Chromium without a network: it draws, sorts, adapts, and asks for nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tunes import on_paper

from ladder.cli.main import main
from ladder.cli.report import read_reported_run
from ladder.report.page import html
from ladder.report.run_data import ReportedRun
from ladder.tuning.tune_events import Note
from ladder.watch.web import followed_at

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
HOSTILE = "</script><img src=https://example.com/x onerror=alert(1)><b>"


CLIPPED = """[...document.querySelectorAll('svg.chart')].flatMap(chart => {
  if (!chart.getClientRects().length) return [];
  const frame = chart.getBoundingClientRect();
  return [...chart.querySelectorAll('text')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
  }).map(text => text.textContent);
})"""
"""The words of figures that reach out of them."""


@dataclass
class Seen:
    """What a page said and asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def run(simulated_run: Path) -> ReportedRun:
    return read_reported_run(simulated_run)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def look(browser: Any, file: Path, *, width: int = 1280, scheme: str = "light") -> Seen:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen = Seen(page)
    page.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("dialog", lambda dialog: (seen.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(file.as_uri())
    return seen


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_draws_and_nothing_comes_from_outside(
    browser: Any, simulated_run: Path, width: int, scheme: str
) -> None:
    file = simulated_run / "report.html"
    seen = look(browser, file, width=width, scheme=scheme)
    drawn = seen.page.evaluate(
        "[...document.querySelectorAll('svg.chart')].filter(each => each.getClientRects().length)"
        ".map(each => each.querySelectorAll('.point').length)"
    )
    assert len(drawn) == 3
    assert min(drawn) > 0
    assert seen.errors == []
    assert seen.requests == [file.as_uri()]
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.evaluate(CLIPPED) == []


@needs_chromium
def test_dark_and_light_are_two_pages_that_can_both_be_read(browser: Any, simulated_run: Path) -> None:
    seen = look(browser, simulated_run / "report.html")
    colours = "(() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor, \
getComputedStyle(document.querySelector('.chart text.label')).fill]; })()"
    light = seen.page.evaluate(colours)
    seen.page.emulate_media(color_scheme="dark")
    seen.page.wait_for_timeout(300)
    dark = seen.page.evaluate(colours)
    assert brightness(light[0]) < 80 < 200 < brightness(light[1])
    assert brightness(dark[1]) < 80 < 200 < brightness(dark[0])
    assert dark[2] == dark[0]  # the figures' text follows
    assert seen.errors == []


def brightness(colour: str) -> float:
    numbers = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 3


@needs_chromium
def test_the_ledger_sorts_by_number_and_by_word_both_ways(browser: Any, simulated_run: Path, run: ReportedRun) -> None:
    page = look(browser, simulated_run / "report.html").page
    speed = page.locator("table.sortable th", has_text="tokens/s")

    def column(number: int) -> list[str]:
        cells: list[str] = page.eval_on_selector_all(
            f"table.sortable tbody td:nth-child({number})",
            "cells => cells.map(cell => cell.dataset.value ?? cell.textContent)",
        )
        return cells

    assert len(column(1)) == len(run.entries)
    speed.locator("button").click()
    speeds = [float(each) for each in column(6) if each]
    assert speeds == sorted(speeds, reverse=True)
    assert speed.get_attribute("aria-sort") == "descending"
    speed.locator("button").click()
    speeds = [float(each) for each in column(6) if each]
    assert speeds == sorted(speeds)
    assert column(6)[-1] == ""  # what has no number is last either way
    page.locator("table.sortable th", has_text="rung").locator("button").click()
    assert column(1) == sorted(column(1), key=str.casefold)
    assert speed.get_attribute("aria-sort") is None


@needs_chromium
def test_rows_can_be_filtered_by_words_and_by_outcome_and_parts_of_a_figure_switched_off(
    browser: Any, simulated_run: Path, run: ReportedRun
) -> None:
    page = look(browser, simulated_run / "report.html").page
    rows = page.locator("table.sortable tbody tr:visible")
    page.locator(".filter input").fill("zero3 OFF")
    texts = rows.all_inner_texts()
    assert 0 < len(texts) < len(run.entries)
    assert all("zero3" in text and "off" in text for text in texts)
    assert page.locator(".filter span").inner_text() == f"{len(texts)} of {len(run.entries)} candidates"
    page.locator(".filter input").fill("")
    page.locator(".filter select").select_option("fits")
    fitting = [entry for entry in run.entries if entry.record and entry.record.outcome.kind == "fits"]
    assert rows.count() == len(fitting)
    figure = page.locator("#run0-memory")
    before = figure.locator(".point:visible").count()
    figure.locator(".legend button", has_text="activations").click()
    assert figure.locator(".point:visible").count() < before


@needs_chromium
def test_a_command_is_copied_and_a_mark_says_what_it_is(browser: Any, simulated_run: Path) -> None:
    seen = look(browser, simulated_run / "report.html")
    seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    command = seen.page.locator(".command", has_text="torchrun")
    command.locator("button").click()
    command.locator("button", has_text="Copied").wait_for()
    assert seen.page.evaluate("navigator.clipboard.readText()") == command.locator("pre").inner_text()
    seen.page.locator("#run0-speed svg:visible .mark polygon").click()  # the star
    assert "its proof reached" in seen.page.locator("#run0-speed .pointed").inner_text()
    assert seen.errors == []


@needs_chromium
def test_it_prints(browser: Any, simulated_run: Path) -> None:
    seen = look(browser, simulated_run / "report.html", scheme="dark")
    assert seen.page.pdf().startswith(b"%PDF")
    seen.page.emulate_media(media="print")
    assert brightness(seen.page.evaluate("getComputedStyle(document.body).color")) == 0
    assert seen.errors == []


@needs_chromium
def test_a_hostile_name_stays_text(browser: Any, run: ReportedRun, tmp_path: Path) -> None:
    model = replace(run.space.workload.model, name=HOSTILE)
    space = replace(run.space, workload=replace(run.space.workload, model=model))
    unsupported = dict.fromkeys(run.unsupported, HOSTILE)
    facts = {**run.facts, "versions": {HOSTILE: HOSTILE}}
    records = [replace(record, warnings=(HOSTILE,)) for record in run.records]
    file = tmp_path / "report.html"
    bad = replace(run, space=space, unsupported=unsupported, facts=facts, records=records)
    file.write_text(html([bad, bad]))
    seen = look(browser, file)
    assert seen.errors == []
    assert seen.requests == [file.as_uri()]
    assert HOSTILE in seen.page.inner_text("h1 >> nth=1")


@needs_chromium
def test_several_runs_stand_beside_each_other(browser: Any, simulated_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "compared.html"
    assert main(["report", str(simulated_run), str(simulated_run), "--output", str(file)]) == 0
    seen = look(browser, file)
    assert seen.page.locator(".comparison thead th").count() == 3
    assert seen.page.locator("svg.chart:visible").count() == 6
    assert seen.errors == []


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_of_a_running_tune_follows_it(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    with followed_at() as (tell, address):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.locator("#drawn", has_text="Getting ready").wait_for()
        tell(Note(HOSTILE))
        on_paper(tmp_path, "tiny-llama", callbacks=[tell])
        page.locator("#state.ended").wait_for()
        assert page.inner_text("#state").startswith("Answer: zero")
        assert page.inner_text("#said li:first-child") == HOSTILE
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert errors == []
        page.close()
