"""When nothing fits: what would, with figures, each of which holds when it is taken at its word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bundled_workload, make_candidate, make_record, there
from helpers.searches import two_small_gpus

from ladder.backends.registry import RUNGS_BY_NAME
from ladder.candidates import Engine
from ladder.cli.main import main
from ladder.errors import NothingFitsError
from ladder.events.outcome import Outcome
from ladder.search.forecast import plan
from ladder.search.remedies import remedies
from ladder.search.space import Space
from ladder.tuning import run
from ladder.tuning.reach import FAR, require_within_reach
from ladder.tuning.venues import here as venue
from ladder.units import GIB


def fits(space: Space) -> bool:
    return any(row.fits == "yes" for row in plan(space).rungs)


def test_as_many_gpus_as_are_named_fit_and_half_of_them_do_not() -> None:
    space = two_small_gpus()
    number = there(remedies(space).num_gpus)
    assert not fits(space)
    assert fits(replace(space, world_size=number, micro_batches=(1,)))
    assert not fits(replace(space, world_size=number // 2, micro_batches=(1,)))


def test_gpus_of_the_size_that_is_named_fit_and_slightly_smaller_ones_are_not_sure_to() -> None:
    space = two_small_gpus()
    size = there(remedies(space).gpu_memory)
    assert fits(replace(space, memory_limit=size))
    assert not fits(replace(space, memory_limit=int(0.9 * size)))


def test_ranks_on_the_cpu_are_given_more_memory_and_no_gpus() -> None:
    space = two_small_gpus(device="cpu")
    found = remedies(space)
    sentence = found.sentence(on_cpu=True)
    assert f"--gpu-memory {-(-there(found.gpu_memory) // GIB)}GiB" in sentence
    assert "GPUs" not in sentence
    assert found.lora is found.qlora is None


def test_a_host_that_is_too_small_for_what_ranks_on_the_cpu_hold_is_named() -> None:
    small = two_small_gpus(device="cpu", memory_limit=200 * GIB, host_memory=8 * GIB)
    found = remedies(small)
    assert found.gpu_memory is None
    assert remedies(replace(small, host_memory=there(found.host_memory))).host_memory is None


def test_the_sequence_that_is_named_fits_and_one_that_is_a_quarter_longer_does_not() -> None:
    space = two_small_gpus(
        workload=bundled_workload("llama-3.2-1b", seq_len=65536, global_batch_size=128), memory_limit=24 * GIB
    )
    length = there(remedies(space).seq_len)
    assert fits(replace(space, workload=replace(space.workload, seq_len=length)))
    assert remedies(two_small_gpus(memory_limit=8 * GIB)).seq_len is None, "none is short enough"
    assert not fits(replace(space, workload=replace(space.workload, seq_len=length * 5 // 4)))


def test_a_smaller_micro_batch_is_a_remedy_where_only_large_ones_were_asked_for() -> None:
    roomy = two_small_gpus(memory_limit=80 * GIB)
    assert remedies(replace(roomy, micro_batches=(64,))).micro_batch == 1
    assert remedies(roomy).micro_batch is None


def test_the_nvme_rungs_are_named_only_where_this_machine_lacks_them() -> None:
    space = two_small_gpus()
    assert remedies(space, unsupported=["zero3+param-nvme+opt-nvme", "zero3+opt-cpu"]).nvme
    assert not remedies(space, unsupported=["zero3+opt-cpu"]).nvme


def test_adapters_take_the_frozen_weights_and_little_else_and_four_bits_are_named_where_sixteen_are_too_many() -> None:
    weights = 2 * two_small_gpus().workload.model.num_parameters
    found = remedies(two_small_gpus(memory_limit=20 * GIB))
    assert weights / 2 < there(found.lora) < weights / 2 + 6 * GIB  # stage 3 divides them between two
    assert found.qlora is None
    found = remedies(two_small_gpus(memory_limit=10 * GIB))
    assert found.lora is None
    assert weights / 4 < there(found.qlora) < 10 * GIB


def test_what_trials_have_taught_counts() -> None:
    space = two_small_gpus(engines=(Engine(RUNGS_BY_NAME["zero3"]),))
    before = remedies(space).gpu_memory
    oom = Outcome(kind="gpu_oom", moment="step", sentence="", bytes_asked=80 * GIB, bytes_free=0)
    more = make_record(make_candidate("zero3", accumulation=64), "gpu_oom", outcome=oom)
    assert there(remedies(space, [more]).gpu_memory) > there(before)


def test_every_eight_gpus_bring_a_host_and_its_memory() -> None:
    small_gpus = two_small_gpus(memory_limit=8 * GIB, host_memory=16 * GIB)  # for eight processes, and no more
    assert (remedies(small_gpus).num_gpus or 0) > 8
    assert remedies(replace(small_gpus, host_memory=12 * GIB)).num_gpus is None


# Before the first trial: what is far from fitting is refused at once, and what may fit is tried.


def space_of_7b(**changes: Any) -> Space:
    return two_small_gpus(**{"micro_batches": (1, 2), **changes})


def least(space: Space) -> int:
    return min(map(space.predicted_peak, space.candidates))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_within_the_margin_is_tried(device: str) -> None:
    space = space_of_7b(device=device)
    nearly, too_little = int(least(space) / FAR[device] * 1.01), int(least(space) / FAR[device] * 0.99)
    require_within_reach(space_of_7b(device=device, memory_limit=nearly), [], asked_for_cpu=False)
    with pytest.raises(NothingFitsError):
        require_within_reach(space_of_7b(device=device, memory_limit=too_little), [], asked_for_cpu=False)


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
