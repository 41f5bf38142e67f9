"""Draw docs/live-view.svg, the picture in the README: `python scripts/picture.py`.

It is the live view itself, of a tune on a machine on paper, exported by rich at the moment when most of the ladder is
filled and a trial still runs.
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from ladder.options.tune import TuneOptions
from ladder.tuning.run import run_tune
from ladder.tuning.tune_events import RankReported, TuneEvent
from ladder.watch.live import Drawing

PICTURE = Path(__file__).parents[1] / "docs" / "live-view.svg"
COMMAND = "ladder tune llama-2-7b --launcher simulated --machine a100-40"
WIDTH, HEIGHT = 106, 40


class Camera(Drawing):
    """Keeps the last picture that was taken while a trial measured."""

    def __init__(self) -> None:
        super().__init__(lambda text: None)
        self.picture = ""

    def __call__(self, event: TuneEvent) -> None:
        super().__call__(event)
        trial = self._progress.trial
        measures = trial is not None and not trial.spec.proof and trial.phase == "measure"
        if isinstance(event, RankReported) and measures:
            paper = Console(
                width=WIDTH,
                height=HEIGHT,
                file=io.StringIO(),
                record=True,
                force_terminal=True,
                color_system="truecolor",
            )
            paper.print(f"[bold]$[/] {COMMAND}", highlight=False)
            paper.print(self)
            self.picture = paper.export_svg(title="ladder", theme=MONOKAI, unique_id="ladder")


def main() -> None:
    camera = Camera()
    with tempfile.TemporaryDirectory() as folder:
        options = TuneOptions(
            model="llama-2-7b",
            launcher="simulated",
            machine="a100-40",
            run_dir=Path(folder) / "run",
            output=Path(folder) / "best_config.json",
        )
        run_tune(options, camera)
    # A picture loads nothing from outside: the reader's own monospaced font does.
    picture = re.sub(r"@font-face \{.*?\}", "", camera.picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code, monospace", "Fira Code, DejaVu Sans Mono, Menlo, Consolas, monospace")
    PICTURE.write_text(
        "\n".join(line.rstrip() for line in picture.splitlines() if line.strip()) + "\n", encoding="utf-8"
    )
    print(f"Wrote {PICTURE}")


if __name__ == "__main__":
    main()
