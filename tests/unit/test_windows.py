"""Which steps of a proof count."""

from __future__ import annotations

from ladder.trial.script.usual import Window, that_count


def window(seconds: float, *, has_firsts: bool = False) -> Window:
    return Window(steps=1, seconds=seconds, wait=0.0, tokens=10.0, padded=12.0, has_firsts=has_firsts)


def test_steps_with_what_a_training_does_once_do_not_count() -> None:
    usual, first = window(0.5), window(2.5, has_firsts=True)
    assert that_count([first, usual, usual, first]) == [usual, usual]


def test_they_count_if_that_goes_on_as_long_as_the_training() -> None:
    first = window(2.5, has_firsts=True)
    assert that_count([first] * 18) == []
    assert that_count([first] * 19) == [first] * 19


def test_long_steps_count_in_any_case() -> None:
    first = window(20.0, has_firsts=True)
    assert that_count([first, window(18.0)]) == [first, window(18.0)]
