"""bf16 where the GPU has it, fp16 where it has not, and a word about the latter."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from ladder.errors import UsageError
from ladder.machine.described import Gpu, Machine, bare_machine
from ladder.tuning.precision import dtype_of
from ladder.units import GIB
from ladder.workload.workload import Dtype

OLD = ("Tesla V100-SXM2-32GB", "Tesla T4", "Tesla P100-PCIE-16GB", "NVIDIA GeForce RTX 2080 Ti", "Quadro RTX 6000")
NEW = ("NVIDIA H200", "NVIDIA L4", "NVIDIA A10", "NVIDIA GeForce RTX 3090", "NVIDIA RTX A4000", None)


def with_gpu(name: str | None) -> Machine:
    return replace(bare_machine(1, GIB), gpus=(Gpu("GPU-1", name, GIB),) if name is not None else ())


@pytest.mark.parametrize("name", OLD)
def test_a_gpu_without_bf16_trains_in_fp16_and_says_so(name: str) -> None:
    notes: list[str] = []
    assert dtype_of(None, with_gpu(name), notes.append) == "fp16"
    assert notes == [f"{name} has no bf16, so training is in fp16 (--dtype)."]
    assert dtype_of("fp16", with_gpu(name), notes.append) == "fp16"
    assert len(notes) == 1
    with pytest.raises(UsageError, match=r"--dtype bf16: .* has no bf16; use --dtype fp16\."):
        dtype_of("bf16", with_gpu(name), notes.append)


@pytest.mark.parametrize("name", NEW)
def test_a_gpu_with_bf16_and_a_cpu_train_in_it_without_a_word(name: str | None) -> None:
    notes: list[str] = []
    assert dtype_of(None, with_gpu(name), notes.append) == "bf16"
    assert [dtype_of(each, with_gpu(name), notes.append) for each in get_args(Dtype)] == list(get_args(Dtype))
    assert notes == []


@pytest.mark.parametrize(("major", "dtype"), [(7, "fp16"), (8, "bf16"), (9, "bf16")])
def test_what_the_driver_says_goes_before_the_name(major: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByUUID", lambda uuid: "handle")
    monkeypatch.setattr("pynvml.nvmlDeviceGetCudaComputeCapability", lambda handle: (major, 0))
    machine = with_gpu("NVIDIA Something")
    assert dtype_of(None, machine, lambda _: None) == dtype
