"""The live view and its plain sibling: what a tune shows while it runs, at any width."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ladder.cli.live import LiveView
from ladder.cli.views import watching
from ladder.tuning.options import TuneOptions
from ladder.tuning.run import run_tune
from ladder.units import GIB

WIDTHS = (40, 80, 120)


class Camera(LiveView):
    """A live view that is drawn each time it is told something, every sixth event included; it keeps the pictures."""

    def __init__(self, width: int, height: int = 60) -> None:
        self.paper = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
        super().__init__(self.paper)
        self.pictures: list[str] = []
        self._num_events = 0

    def shoot(self) -> str:
        with self.paper.capture() as capture:
            self.paper.print(self)
        self.pictures.append(capture.get())
        return self.pictures[-1]

    def searching(self, *told: Any) -> None:
        super().searching(*told)
        self.shoot()

    def trial_begins(self, *told: Any) -> None:
        super().trial_begins(*told)
        self.shoot()

    def event(self, *told: Any) -> None:
        super().event(*told)
        self._num_events += 1
        if self._num_events % 6 == 0:
            self.shoot()

    def trial_ends(self, *told: Any) -> None:
        super().trial_ends(*told)
        self.shoot()


class Crew:
    """Cameras that film the same tune."""

    def __init__(self, *cameras: Camera) -> None:
        self._cameras = cameras

    def __getattr__(self, name: str) -> Any:
        def tell(*told: Any) -> None:
            for camera in self._cameras:
                getattr(camera, name)(*told)

        return tell


def tune(view: Any, folder: Path) -> None:
    options = {"model": "llama-2-7b", "launcher": "simulated", "machine": "a100-40"}
    run_tune(TuneOptions(**options, run_dir=folder / "run", output=folder / "best_config.json"), view)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Camera]:
    """One tune on terminals of several sizes, by their width and height."""
    films = {(width, 60): Camera(width) for width in WIDTHS} | {(100, 20): Camera(100, height=20)}
    tune(Crew(*films.values()), tmp_path_factory.mktemp("film"))
    return films


@pytest.fixture(params=WIDTHS)
def filmed(request: pytest.FixtureRequest, films: dict[tuple[int, int], Camera]) -> Camera:
    return films[request.param, 60]


def test_no_picture_is_wider_or_higher_than_the_terminal(filmed: Camera) -> None:
    for picture in filmed.pictures:
        lines = picture.splitlines()
        assert max(map(len, lines)) <= filmed.paper.width
        assert len(lines) <= filmed.paper.height


def test_the_ladder_fills_while_the_tune_runs(filmed: Camera) -> None:
    def tried(picture: str) -> int:
        return len(re.findall(r"\b(?:fits|best|gpu_oom)\b", picture.partition("not on this machine")[0]))

    first, last = filmed.pictures[0], filmed.pictures[-1]
    assert tried(first) == 0
    assert tried(last) > 5
    assert "zero3" in first  # also what was not tried yet has its line
    assert "nothing fits so far" in first
    assert "proven" in last


def test_what_a_trial_has_measured_is_shown_before_the_trial_ends(filmed: Camera) -> None:
    during = [picture for picture in filmed.pictures if "running" in picture and "trial 0001" in picture]
    assert any("fits" in picture.partition("not on this machine")[0] for picture in during)


def test_a_low_terminal_shows_each_engine_in_one_line(films: dict[tuple[int, int], Camera]) -> None:
    camera = films[100, 20]
    assert all(len(picture.splitlines()) <= 20 for picture in camera.pictures)
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
        camera.note("model \x1b[31mred\x1b[0m\x07 [bold]name[/bold]")
    assert "\x1b" not in capture.get()
    assert "\x07" not in capture.get()
    assert "[bold]name[/bold]" in capture.get()


def test_the_rest_shrinks_to_nothing_as_the_tune_ends(tmp_path: Path) -> None:
    from ladder.cli.progress import Progress

    seen: list[float] = []

    class Watch(Progress):
        def _estimate(self) -> None:
            super()._estimate()
            assert self.rest is not None
            assert 0 <= self.rest.least <= self.rest.most
            seen.append(self.rest.most)

        def note(self, text: str) -> None: ...

    tune(Watch(), tmp_path)
    assert len(seen) > 3
    assert seen[0] > 60
    assert seen[-1] < 0.2 * seen[0]


@pytest.mark.parametrize("quiet", [True, False])
def test_without_a_terminal_a_tune_is_plain_lines_or_silence(
    quiet: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with watching(quiet=quiet) as view:
        tune(view, tmp_path)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "\x1b" not in printed.err
    assert bool(re.search(r"^trial 0001: ", printed.err, re.MULTILINE)) is not quiet


def test_a_tune_that_goes_on_says_how_much_is_measured_already(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with watching(quiet=False) as view:
            tune(view, tmp_path)
    assert re.search(r"^Going on: \d+ of \d+ candidates are measured already\.$", capfd.readouterr().err, re.MULTILINE)


def test_bars_are_full_at_the_limit_and_above_it() -> None:
    from ladder.cli.bars import bar, columns

    assert bar(1.0, 4).plain == bar(3.0, 4).plain == "████"
    assert bar(0.0, 4).plain == "░░░░"
    assert bar(0.5, 4).plain == "██░░"
    assert columns([0.0, 0.5, 1.0, 9.0]).plain == "▁▅██"
    assert len(bar(GIB / (3 * GIB), 10)) == 10
