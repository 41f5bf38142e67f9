"""The live view and its plain sibling: what a tune shows while it runs, at any width."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import urlopen

import pytest
from helpers import tiny_trial
from helpers.events import measured_event
from helpers.searches import fitting, make_space
from rich.console import Console
from rich.text import Text

from ladder.events.protocol import MeasuredEvent, TrialSpec
from ladder.events.trial_run import TrialRun
from ladder.options.tune import TuneOptions
from ladder.tuning.run import run_tune
from ladder.tuning.tune_events import (
    Note,
    RankReported,
    SearchBegins,
    Subscriber,
    TrialBegins,
    TrialEnds,
    TuneEvent,
    each_of,
)
from ladder.units import GIB
from ladder.watch import watching
from ladder.watch.live import Drawing
from ladder.watch.progress import Progress
from ladder.watch.web import followed_at

WIDTHS = (40, 80, 120)
SPACE = make_space("zero1", "zero2", world_size=2, probe_layers=4)
FITTING = [fitting(SPACE, candidate) for candidate in SPACE.candidates]


class Camera(Drawing):
    """A live view that is drawn each time it is told something, every sixth event included; it keeps the pictures."""

    def __init__(self, width: int, height: int = 60) -> None:
        self.paper = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
        super().__init__(lambda text: self.paper.print(Text(text)))
        self.pictures: list[str] = []
        self._num_events = 0

    def shoot(self) -> str:
        with self.paper.capture() as capture:
            self.paper.print(self)
        self.pictures.append(capture.get())
        return self.pictures[-1]

    def __call__(self, event: TuneEvent) -> None:
        super().__call__(event)
        self._num_events += isinstance(event, RankReported)
        if isinstance(event, SearchBegins | TrialBegins | TrialEnds) or (
            isinstance(event, RankReported) and self._num_events % 6 == 0
        ):
            self.shoot()


class Watch(Progress):
    """It keeps each estimate of the time that is left at most."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        super().__init__()

    def _estimate(self) -> None:
        super()._estimate()
        assert self.rest is not None
        assert 0 <= self.rest.least <= self.rest.most
        self.seen.append(self.rest.most)


def tune(tell: Subscriber, folder: Path) -> None:
    options: dict[str, Any] = {"model": "llama-2-7b", "launcher": "simulated", "machine": "a100-40"}
    run_tune(TuneOptions(**options, run_dir=folder / "run", output=folder / "best_config.json"), tell)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[int, int], Camera], Watch]:
    """One tune on terminals of several sizes, by their width and height, and what was estimated."""
    films = {(width, 60): Camera(width) for width in WIDTHS} | {(100, 20): Camera(100, height=20)}
    watch = Watch()
    tune(each_of(*films.values(), watch), tmp_path_factory.mktemp("film"))
    return films, watch


@pytest.fixture
def films(watched: tuple[dict[tuple[int, int], Camera], Watch]) -> dict[tuple[int, int], Camera]:
    return watched[0]


def test_no_picture_is_wider_or_higher_than_the_terminal(films: dict[tuple[int, int], Camera]) -> None:
    for (width, height), camera in films.items():
        for picture in camera.pictures:
            lines = picture.splitlines()
            assert max(map(len, lines)) <= width
            assert len(lines) <= height


@pytest.mark.parametrize("width", WIDTHS)
def test_the_ladder_fills_while_the_tune_runs_and_also_while_a_trial_does(
    width: int, films: dict[tuple[int, int], Camera]
) -> None:
    def tried(picture: str) -> int:
        return len(re.findall(r"\b(?:fits|best|gpu_oom)\b", picture.partition("not on this machine")[0]))

    first, *_, last = pictures = films[width, 60].pictures
    assert tried(first) == 0
    assert tried(last) > 3
    assert "zero3" in first  # also what was not tried yet has its line
    assert "nothing fits so far" in first
    assert "proven" in last
    assert any(tried(picture) for picture in pictures if "running" in picture and "trial 0001" in picture)


def test_a_low_terminal_shows_each_engine_in_one_line(films: dict[tuple[int, int], Camera]) -> None:
    camera = films[100, 20]
    assert len(re.findall(r"^zero2 ", camera.pictures[-1], re.MULTILINE)) == 1
    assert "proven" in camera.pictures[-1]


def test_the_memory_bar_is_as_long_as_the_fullest_gpu_is_full(films: dict[tuple[int, int], Camera]) -> None:
    lines = films[120, 60].pictures[-1].splitlines()
    bars = {float(m[2]): m[1].count("█") for line in lines if (m := re.search(r"([█▏▎▍▌▋▊▉░]{12}) +([\d.]+)", line))}
    assert len(bars) > 3
    for held, cells in bars.items():
        assert cells == pytest.approx(12 * held / 40, abs=1)


def test_what_a_trial_says_cannot_paint_the_terminal() -> None:
    camera = Camera(80)
    with camera.paper.capture() as capture:
        camera(Note("model \x1b[31mred\x1b[0m\x07 [bold]name[/bold]"))
    assert "\x1b" not in capture.get()
    assert "\x07" not in capture.get()
    assert "[bold]name[/bold]" in capture.get()


def test_the_rest_shrinks_to_nothing_as_the_tune_ends(
    watched: tuple[dict[tuple[int, int], Camera], Watch],
) -> None:
    seen = watched[1].seen
    assert len(seen) > 3
    assert seen[0] > 60
    assert seen[-1] < 0.2 * seen[0]


def test_what_has_to_come_after_a_trial_is_left_however_long_the_trial_takes(
    progress: Progress, tmp_path: Path
) -> None:
    spec = tiny_trial(tmp_path, 1)
    progress(TrialEnds(TrialRun(spec=spec, events=[]), FITTING))
    assert progress.rest is not None
    assert 0 < progress.rest.proof < progress.rest.most
    far = time.monotonic() + 10_000
    after_changes: list[tuple[dict[str, Any], float]] = [
        ({}, progress.rest.proof + progress.rest.comparisons),
        ({"parity": True}, progress.rest.proof),
        ({"proof": True}, 0.0),
    ]
    for changes, after in after_changes:
        progress(TrialBegins(replace(spec, **changes), "to be seen"))
        assert progress.left(far) == (after, after)


def test_a_simulated_tune_gives_no_estimate_of_real_time(films: dict[tuple[int, int], Camera]) -> None:
    pictures = films[120, 60].pictures
    assert all("no estimate of the time left, as trials are simulated" in picture for picture in pictures)
    assert not any(re.search(r"\bleft$|almost done|of about", picture, re.MULTILINE) for picture in pictures)


def measured(spec: TrialSpec, peak: int) -> MeasuredEvent:
    """What a rank says of the trial's first candidate."""
    peaks = dict.fromkeys(("peak_allocated", "peak_reserved", "peak_device"), peak)
    return measured_event(spec.candidates[0].key, accumulate_seconds=[0.1], **peaks)


def watch_a_trial(progress: Progress, spec: TrialSpec, peak_device: int, seconds: float) -> None:
    """All that a view is told of a trial which measures its candidate on every rank; the tune keeps no record of it."""
    progress(TrialBegins(spec, "to be seen"))
    for rank in range(spec.world_size):
        progress(RankReported(rank, measured(spec, peak_device)))
    progress(TrialEnds(TrialRun(spec=spec, events=[], started=seconds), []))


@pytest.fixture
def progress() -> Progress:
    """Of a tune on two GPUs that has not begun any trial."""
    progress = Progress()
    progress(SearchBegins(SPACE, {}, ()))
    return progress


@pytest.mark.parametrize("kind", ["parity", "probe"])
def test_what_a_shallow_model_takes_is_not_shown_as_the_candidate_s(
    kind: str, progress: Progress, tmp_path: Path
) -> None:
    whole = tiny_trial(tmp_path, 1, memory_limit=80 * GIB)
    watch_a_trial(progress, whole, 30 * GIB, 60.0)
    shallow = replace(whole, parity=kind == "parity", probe=kind == "probe")
    watch_a_trial(progress, shallow, GIB, 5.0)
    assert progress.peaks == {whole.candidates[0].key: (30 * GIB, 30 * GIB)}
    progress(TrialBegins(shallow, "to be seen"))
    progress(RankReported(0, measured(shallow, GIB)))
    assert progress.best is None


def test_without_a_terminal_a_tune_is_plain_lines_or_silence_and_says_how_much_is_measured_already(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for quiet in (False, False, True):
        with watching(quiet=quiet) as view:
            tune(view, tmp_path)
        printed = capfd.readouterr()
        assert printed.out == ""
        said.append(printed.err)
    first, again, silence = said
    assert "\x1b" not in first
    assert re.search(r"^trial 0001: ", first, re.MULTILINE)
    assert re.search(r"^  would have taken ", first, re.MULTILINE)
    for announced, lines in re.findall(r"^trial \d+: (\d+) candidates? of .*\n((?:  .*\n)*)", first, re.MULTILINE):
        told = re.findall(r"^  \S+ ckpt=", lines, re.MULTILINE)
        assert len(told) == int(announced) or "oom" in lines, "what was left out is said too"
    assert not re.search(r"^  \d+\.\d s \(", first, re.MULTILINE), "no time is estimated"
    assert re.search(r"^Continuing: \d+ of \d+ candidates are measured already\.$", again, re.MULTILINE)
    assert "trial 0001" not in silence


# In the browser


def test_a_page_at_localhost_shows_the_tune_to_those_who_know_its_address_alone(tmp_path: Path) -> None:
    with followed_at() as (page, address):
        assert urlsplit(address).hostname == "127.0.0.1"
        page(Note("a <b>name</b>"))
        tune(page, tmp_path)
        with urlopen(f"{address}now?columns=80", timeout=10) as answer:
            now = json.load(answer)
        with urlopen(address, timeout=10) as answer:
            assert b"<title>ladder tune</title>" in answer.read()
        for stranger in (urljoin(address, "/"), urljoin(address, "/now"), address.rstrip("/") + "x/"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(stranger, timeout=10)
    assert now["headline"].startswith(f"proven {now['ended']}")
    assert now["ended"] in unescape(now["drawn"])
    assert max(map(len, unescape(re.sub(r"<.*?>", "", now["drawn"])).splitlines())) <= 80
    assert now["said"][0] == "a <b>name</b>"  # the page sets it as text
    with pytest.raises(URLError):
        urlopen(address, timeout=10)
