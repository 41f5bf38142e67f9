"""Which steps of a proof count."""

from __future__ import annotations

from ladder.trial.script.usual import Window, that_count


def window(seconds: float, *, compiles: bool = False) -> Window:
    return Window(steps=1, seconds=seconds, wait=0.0, tokens=10.0, padded=12.0, compiles=compiles)


def test_steps_in_which_kernels_were_compiled_do_not_count() -> None:
    usual, compiling = window(0.5), window(2.5, compiles=True)
    assert that_count([compiling, usual, usual, compiling]) == [usual, usual]


def test_steps_of_a_training_that_compiles_as_long_as_it_runs_count() -> None:
    compiling = window(2.5, compiles=True)
    assert that_count([compiling] * 18) == []
    assert that_count([compiling] * 19) == [compiling] * 19
