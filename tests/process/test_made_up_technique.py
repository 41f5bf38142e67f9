"""The made-up technique's half runs in real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import tiny_trial
from helpers.made_up import MADE_UP
from helpers.processes import Bench


def test_a_rank_imports_the_half_of_a_technique_that_only_the_specification_names(
    local_bench: Callable[..., Bench],
    trial_environment: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = str(Path(__file__).parents[1])
    before = trial_environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setitem(trial_environment, "PYTHONPATH", os.pathsep.join(filter(None, [here, before])))
    spec = tiny_trial(tmp_path / "0001", 1).model_copy(
        update={"techniques": (MADE_UP.name,), "rank_modules": (MADE_UP.rank_module,)}
    )
    bench = local_bench()
    run = bench.run(spec)
    bench.launcher.close()
    assert set(run.exits.values()) == {0}
    assert "the made-up technique was here" in (tmp_path / "0001" / "rank0.log").read_text()
