"""Before the first trial: what is far from fitting is refused at once, and what may fit is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload
from helpers.searches import two_small_gpus

from ladder.cli.main import main
from ladder.errors import NothingFitsError
from ladder.search.space import Space
from ladder.tuning import run, venue
from ladder.tuning.reach import FAR, require_within_reach
from ladder.units import MIB


def space_of_7b(**changes: Any) -> Space:
    return two_small_gpus(**{"micro_batches": (1, 2), **changes})


def least(space: Space) -> int:
    return min(map(space.predicted_peak, space.candidates))


def test_what_is_far_from_fitting_is_refused_with_what_would_fit() -> None:
    with pytest.raises(NothingFitsError, match=r"predicted to fit in 16\.00 GiB per GPU: even zero3 .* What would fit"):
        require_within_reach(space_of_7b(), [], asked_for_cpu=False)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_within_the_margin_is_tried(device: str) -> None:
    space = space_of_7b(device=device)
    nearly, too_little = int(least(space) / FAR[device] * 1.01), int(least(space) / FAR[device] * 0.99)
    require_within_reach(space_of_7b(device=device, memory_limit=nearly), [], asked_for_cpu=False)
    with pytest.raises(NothingFitsError):
        require_within_reach(space_of_7b(device=device, memory_limit=too_little), [], asked_for_cpu=False)


def test_the_smoke_model_is_tried_on_a_cpu() -> None:
    workload = bundled_workload("tiny-llama", seq_len=128, global_batch_size=8)
    smoke = space_of_7b(workload=workload, device="cpu", memory_limit=700 * MIB)
    require_within_reach(smoke, [], asked_for_cpu=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No GPU is visible (`ladder doctor` says why), so the model would train on 2 CPU ranks"),
        (["--gpus", "0"], "--gpus 0 asks for 2 CPU ranks"),
    ],
)
def test_a_tune_without_gpus_ends_before_anything_is_built_and_says_what_to_do(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a trial was prepared")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(venue, "Operators", never)
    monkeypatch.setattr(run, "History", never)
    memory = ["--gpu-memory", "8GiB", "--host-memory", "64GiB"]
    assert main(["tune", "llama-2-7b", *arguments, *memory]) == NothingFitsError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert "Nothing is predicted to fit in 8.00 GiB per CPU rank" in said
    assert "`ladder tune llama-2-7b --launcher simulated --machine a100-80`" in said
    assert list(tmp_path.iterdir()) == []
