"""Which steps of a proof count."""

from __future__ import annotations

from ladder.trial.script.usual import Window, may_be_calm_soon, that_count


def window(seconds: float, *, has_firsts: bool = False, wait: float = 0.0, padded: float = 12.0) -> Window:
    return Window(steps=1, seconds=seconds, wait=wait, tokens=10.0, padded=padded, has_firsts=has_firsts)


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


def test_stalls_that_are_over_do_not_count_and_a_proof_waits_for_that() -> None:
    """The steps of TRL's SFT on an H100."""
    usual, stall = window(0.47), window(2.0)
    early = [usual, usual, usual, stall, usual, stall, usual, usual]
    assert may_be_calm_soon(early, 10.0)
    assert that_count(early) == early
    calm = [usual] * 22
    assert that_count(early + calm) == [usual] * 24
    assert not may_be_calm_soon(early + calm, 10.0)


def test_stalls_that_go_on_are_the_training_s() -> None:
    windows = [window(0.47), window(0.47), window(0.47), window(2.0)] * 12
    assert not may_be_calm_soon(windows, 10.0)
    assert that_count(windows) == windows


def test_longer_batches_and_late_ones_are_no_stalls() -> None:
    usual, longer, late = window(0.47), window(1.0, padded=26.0), window(2.0, wait=1.5)
    windows = [usual, longer, usual, late, *[usual] * 30]
    assert not may_be_calm_soon(windows, 10.0)
    assert that_count(windows) == windows


def test_windows_that_are_all_alike_are_enough() -> None:
    assert not may_be_calm_soon([window(0.5)] * 8, 10.0)
    assert not may_be_calm_soon([], 10.0)


def test_windows_that_generate_for_different_times_all_count() -> None:
    generates, long_one = window(1.5), window(4.0)
    windows = [generates, generates, long_one, *[generates] * 10]
    assert that_count(windows, are_alike=False) == windows
    assert that_count(windows) == [generates] * 10
