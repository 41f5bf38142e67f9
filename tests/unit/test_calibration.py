"""What is learnt from measurements: freaks bend little, nothing runs away, and surprises leave doubt."""

from __future__ import annotations

import pytest

from ladder.search.calibration import Datum, fit

SIGMA = 0.1
"""A surprise of one standard deviation changes what is predicted by a tenth."""


def datum(name: str, target: float, *, noise: float = 0.02, is_lower_bound: bool = False) -> Datum:
    """A measurement of what depends on one unknown only; `target` is a logarithm, 0 as expected."""
    return Datum(
        formula=lambda unknowns: SIGMA * unknowns.get(name, 0.0),
        names=(name,),
        target=target,
        noise=noise,
        is_lower_bound=is_lower_bound,
    )


def test_one_freak_among_measurements_that_agree_moves_them_little() -> None:
    usual = [datum("compute", 0.1)] * 5
    freak = datum("compute", 0.8)
    agreed, with_freak = (fit(data).values["compute"] for data in (usual, [*usual, freak]))
    assert agreed == pytest.approx(1.0, rel=0.05)
    assert with_freak == pytest.approx(agreed, rel=0.25)


def test_measurements_that_agree_on_the_impossible_move_an_unknown_no_further_than_four_deviations() -> None:
    found = fit([datum("compute", 3.0)] * 20)
    assert 3.0 < found.values["compute"] <= 4.0


def test_measurements_that_contradict_what_was_expected_leave_more_doubt_than_those_that_confirm_it() -> None:
    names = [f"engine {number}" for number in range(6)]
    confirming, contradicting = (fit([datum(name, target) for name in names]) for target in (0.02, 0.3))
    assert confirming.surprise == 1.0
    assert contradicting.surprise > 1.5


def test_what_is_at_least_so_much_says_nothing_where_more_is_expected() -> None:
    assert fit([datum("memory", -0.5, is_lower_bound=True)]).values["memory"] == 0.0
    assert fit([datum("memory", 0.5, is_lower_bound=True)]).values["memory"] > 1.0
