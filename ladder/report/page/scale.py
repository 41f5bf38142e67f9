"""The page of `ladder scale`: one file that contains everything and loads nothing."""

from __future__ import annotations

from ladder.report.page import figure_of, rendered
from ladder.report.scale_figure import efficiency_by_gpus, speed_by_gpus
from ladder.report.scale_points import ScaleResult, rows_of

_SPEED = (
    "The best configuration of each number of GPUs. A bar is the range of a prediction, in which 80 % of them should "
    "lie. The dotted line is the speed of the smallest number, if no GPU were slower with more of them."
)
_EFFICIENCY = "Tokens/s on each GPU, compared with the smallest number that fits."


def scale_page(result: ScaleResult) -> str:
    """The text of report.html."""
    titles, rows = rows_of(result)
    return rendered(
        "scale.html.j2",
        title=f"ladder scale: {result.model}",
        heading=f"{result.model} by the number of GPUs",
        about=f"A global batch of {result.global_batch_size:,} sequences on each number.",
        verdict=result.verdict,
        smallest=result.fewest_sentence,
        figures=[
            figure_of("scale-speed", "Tokens per second", _SPEED, speed_by_gpus(result)),
            figure_of("scale-efficiency", "Efficiency", _EFFICIENCY, efficiency_by_gpus(result)),
        ],
        titles=titles,
        rows=rows,
        left_out=list(result.left_out.values()),
    )
