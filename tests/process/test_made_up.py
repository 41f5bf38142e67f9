"""What is made up for these tests runs its half in real ranks, which only the specification tells of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import Bench, tiny_trial
from helpers.made_up import MADE_UP
from helpers.made_up_backend import MADE_UP_BACKEND

from ladder.launch.base import Deadlines

TESTS = str(Path(__file__).parents[1])


def test_a_rank_imports_the_halves_of_a_technique_a_backend_and_an_optimizer(
    local_bench: Callable[..., Bench],
    trial_environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = trial_environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setitem(trial_environment, "PYTHONPATH", f"{TESTS}{os.pathsep}{before}")
    spec = replace(
        tiny_trial(tmp_path / "0001", 1, rung="ddp"),
        techniques=(MADE_UP.name,),
        rank_modules=(MADE_UP.rank_module,),
        backend_module=MADE_UP_BACKEND.rank_module,
        optimizer_module="helpers.made_up_rank",
    )
    with closing(local_bench().launcher) as launcher:
        run = launcher.run(spec, Deadlines(), lambda rank, event: None)
    assert set(run.exits.values()) == {0}
    log = (tmp_path / "0001" / "rank0.log").read_text()
    assert [what for what in ("technique", "backend", "optimizer") if f"the made-up {what} was here" not in log] == []
