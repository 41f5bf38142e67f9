"""What more GPUs bring: the numbers asked for, prices, and where they stop paying."""

from __future__ import annotations

import pytest

from ladder.errors import UsageError
from ladder.report.scale_points import ScalePoint, ScaleResult, with_prices
from ladder.tuning.scale_options import counts_in


def point(gpus: int, speed: float | None, *, nodes: int = 1, is_sure: bool = True) -> ScalePoint:
    source = "measured" if speed else "none"
    return ScalePoint(gpus=gpus, nodes=nodes, source=source, tokens_per_second=speed, is_sure=is_sure)


def result(*points: ScalePoint) -> ScaleResult:
    return ScaleResult(model="m", global_batch_size=8, price=None, points=points, left_out={})


def test_numbers_of_gpus_are_sorted() -> None:
    assert counts_in("8, 1,2") == [1, 2, 8]


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "2.5", "4096", "²", "1,1", "9" * 5000])
def test_bad_numbers_of_gpus_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        counts_in(text)


def test_efficiency_is_against_the_smallest_number_that_has_a_speed() -> None:
    points = with_prices([point(1, None), point(2, 200.0), point(4, 300.0)], None)
    assert [each.efficiency for each in points] == [None, 1.0, 0.75]


def test_a_billion_tokens_cost_the_gpu_hours_that_they_take() -> None:
    (one,) = with_prices([point(4, 1e9 / 3600)], 2.5)
    assert one.cost == pytest.approx(10.0)


def test_the_fewest_gpus_are_those_that_surely_fit() -> None:
    assert result(point(1, None), point(2, 5.0, is_sure=False), point(4, 9.0)).smallest == 4
    assert result(point(1, 5.0, is_sure=False)).smallest is None


def test_one_node_can_be_faster_than_two() -> None:
    assert result(point(8, 100.0), point(16, 90.0, nodes=2)).verdict == "One node is faster than several."


def test_gpus_stop_paying_where_an_added_one_brings_less_than_half() -> None:
    verdict = result(point(1, 100.0), point(2, 190.0), point(4, 260.0)).verdict
    assert verdict.startswith("More GPUs stop paying after 2")
    assert result(point(8, 100.0), point(16, 120.0, nodes=2)).verdict.startswith("A second node stops paying after 8")
    assert result(point(1, 100.0), point(2, 190.0)).verdict.startswith("More GPUs pay")
