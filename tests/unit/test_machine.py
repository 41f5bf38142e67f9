"""What the machine is taken to be: the GPUs that CUDA would show, the memory that may be had, what cannot work."""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from helpers import machine_with

from ladder.backends.deepspeed.rungs import RUNGS
from ladder.backends.registry import RUNGS_BY_NAME, backend_of
from ladder.candidates import Rung
from ladder.errors import UsageError
from ladder.machine import gpus as gpus_module
from ladder.machine import host, machine
from ladder.machine.described import Gpu, Machine, bare_machine
from ladder.machine.gpus import allocator_settings, may_register, obstacle
from ladder.machine.machine import CPU_RANKS, detect_machine, unsupported_reason
from ladder.units import GIB
from ladder.workload.workload import OptimizerName

GPUS = [Gpu(f"GPU-{letter * 4}", "NVIDIA H200", 140 * GIB) for letter in "abcd"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: list(GPUS))
    monkeypatch.setattr(machine, "obstacle", lambda gpu, needed: None)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", list)


def detected(**wishes: Any) -> Machine:
    return detect_machine(**{"gpus": None, "gpu_memory": None, "host_memory": None, "nvme_path": None} | wishes)


def a_machine(device: str = "cuda", nvme_path: Path | None = None) -> Machine:
    return replace(machine_with(4, device), nvme_path=nvme_path)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("1,0", [1, 0]),
        ("-1", []),
        ("0,9,1", [0]),
        ("NoDevFiles", []),
        ("GPU-cccc,GPU-a", [2, 0]),
        ("0,,1", [0]),
    ],
)
def test_cuda_visible_devices_chooses_orders_and_ends_at_the_first_unknown_name(
    visible: str | None, indices: list[int]
) -> None:
    assert gpus_module._as_cuda_sees(GPUS, visible) == [GPUS[index] for index in indices]


def test_among_gpus_of_several_models_a_number_is_taken_only_where_cuda_counts_as_nvml_does() -> None:
    mixed = [Gpu("GPU-small", "NVIDIA RTX A4000", 16 * GIB), GPUS[0]]
    with pytest.raises(UsageError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs"):
        gpus_module._as_cuda_sees(mixed, "0")
    assert gpus_module._as_cuda_sees(mixed, "0", in_bus_order=True) == mixed[:1]
    assert gpus_module._as_cuda_sees(mixed, "GPU-small") == mixed[:1]
    broken = Gpu("index 1", "unknown", 0, "GPU 1 cannot be used")
    assert gpus_module._as_cuda_sees([GPUS[0], broken], "0") == GPUS[:1]


@pytest.mark.usefixtures("four_gpus")
def test_all_visible_gpus_are_used_unless_fewer_are_asked_for_and_the_smallest_sets_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert detected().world_size == 4
    assert detected(gpus=2).gpus == tuple(GPUS[:2])
    assert detected().memory_limit == 140 * GIB
    assert detected(gpu_memory=40 * GIB).memory_limit == 40 * GIB
    found = detected(gpus=0)
    assert (found.device, found.world_size, found.gpus, found.gpu_name) == ("cpu", CPU_RANKS, (), None)
    monkeypatch.setattr(machine, "visible_gpus", lambda: [GPUS[0], Gpu("GPU-small", "NVIDIA A100", 40 * GIB)])
    assert detected().memory_limit == 40 * GIB


@pytest.mark.usefixtures("four_gpus")
def test_more_than_there_is_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match=r"more GPUs than the 4 visible.*--gpus 4"):
        detected(gpus=5)
    with pytest.raises(UsageError, match=r"--gpu-memory 200\.00 GiB is more than"):
        detected(gpu_memory=200 * GIB)


@pytest.mark.usefixtures("no_gpus")
def test_without_gpus_ranks_are_cpu_ranks_that_share_the_host_memory_and_gpus_are_refused() -> None:
    found = detected(host_memory=10 * GIB)
    assert (found.device, found.world_size, found.memory_limit) == ("cpu", 2, 4 * GIB)
    with pytest.raises(UsageError, match=r"0 visible here.*--gpus 0 \(CPU\)"):
        detected(gpus=3)


@pytest.mark.usefixtures("four_gpus")
def test_only_a_limit_that_is_below_the_whole_device_is_one() -> None:
    assert [detected(gpu_memory=size and size * GIB).is_limited for size in (None, 40, 138, 139, 140)] == [
        *(False, True, True, False, False)
    ]
    on_cpu = [detected(gpus=0, host_memory=10 * GIB, gpu_memory=size) for size in (None, GIB, 4 * GIB, 8 * GIB)]
    assert [each.is_limited for each in on_cpu] == [False, True, False, False]
    assert not bare_machine(8, 40 * GIB).is_limited, "nothing else is known of its GPUs"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["max", f"{8 * GIB}"], 8 * GIB),
        ([f"{8 * GIB}", f"{6 * GIB}"], 6 * GIB),
        (["9223372036854771712"], None),  # what version 1 writes where there is no limit
        (["max"], None),
        ([], None),
        (["nonsense"], None),
    ],
)
def test_host_memory_is_the_tightest_cgroup_limit_or_all_there_is(
    texts: list[str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1")  # what lies above the root is not read
    in_cgroup([{"memory.max": text} for text in texts], True, tmp_path / "root", monkeypatch, of="memory")
    assert host.host_memory() == (expected or psutil.virtual_memory().total)


CORES = 16


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))


def in_cgroup(
    texts: list[dict[str, str]], v2: bool, root: Path, monkeypatch: pytest.MonkeyPatch, of: str = "cpu"
) -> None:
    """Put this process into the innermost of three nested cgroups, which hold `texts` by file name, inside first."""
    folders = [root / "outer" / "inner", root / "outer", root]
    folders[0].mkdir(parents=True)
    for folder, files in zip(folders, texts, strict=False):
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(host, f"{of}_cgroups", lambda: [host.Cgroup(folders[0], root, v2=v2)])


@pytest.mark.usefixtures("sixteen_cores", "no_gpus")
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["150000 100000"], 2),  # a part of a core needs a thread to use it
        (["10000 100000"], 1),
        (["max 100000", "400000 100000"], 4),
        (["400000 100000", "800000 100000"], 4),
        (["6400000 100000"], CORES),
        (["nonsense"], CORES),
        ([], CORES),
    ],
)
def test_the_cores_are_those_that_the_quota_of_a_container_pays_for(
    texts: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cgroup([{"cpu.max": text} for text in texts], True, tmp_path, monkeypatch)
    assert detected(host_memory=GIB).num_cores == expected


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", CORES)])
def test_the_quota_of_version_1_counts_too(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cgroup([{}, {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": "100000"}], False, tmp_path, monkeypatch)
    assert host.usable_cores() == expected


@pytest.mark.usefixtures("sixteen_cores")
def test_the_quota_is_read_where_the_kernel_says_that_this_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LADDER_CGROUP_ROOT", str(tmp_path))
    cgroups = host.cpu_cgroups()
    if not cgroups:
        pytest.skip("the kernel tells of no cgroup")
    for cgroup in cgroups:
        texts = {"cpu.max": "500000 100000", "cpu.cfs_quota_us": "500000", "cpu.cfs_period_us": "100000"}
        cgroup.folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (cgroup.folder / name).write_text(text)
    assert host.usable_cores() == 5


@pytest.mark.parametrize("of_torch", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocators_are_told_what_is_best_for_trials_but_where_the_user_told_them_otherwise(
    monkeypatch: pytest.MonkeyPatch, of_torch: str
) -> None:
    monkeypatch.setattr(gpus_module, "may_register", lambda: True)
    assert allocator_settings({"PATH": "/bin", of_torch: ""}) == {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,"
        "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
    }
    theirs = {of_torch: "max_split_size_mb:64,pinned_use_background_threads:True"}
    assert allocator_settings(theirs) == theirs | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    theirs |= {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}
    assert allocator_settings(theirs) == theirs


@pytest.mark.parametrize(
    ("kernel", "overcommit", "may"),
    [
        ("6.8.0-generic", "0", True),
        ("6.8.0-generic", "1", True),
        ("6.8.0-generic", "2", False),
        ("6.8.0-generic", None, True),
        ("5.15.167.4-microsoft-standard-WSL2", "1", False),
    ],
)
def test_where_malloc_may_fail_or_gives_addresses_the_gpu_does_not_know_torch_pins_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, overcommit: str | None, may: bool
) -> None:
    policy = tmp_path / "overcommit_memory"
    if overcommit is not None:
        policy.write_text(f"{overcommit}\n")
    monkeypatch.setattr(gpus_module, "_OVERCOMMIT", policy)
    monkeypatch.setattr(platform, "release", lambda: kernel)
    assert may_register() == may
    assert allocator_settings({})["PYTORCH_CUDA_ALLOC_CONF"].endswith("pinned_num_register_threads:8") == may


@pytest.fixture
def well_equipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def reason_of(rung: Rung, machine: Machine, optimizer: OptimizerName = "adamw") -> str | None:
    return unsupported_reason(rung, machine, backend_of(rung).operators(rung, optimizer))


@pytest.mark.usefixtures("well_equipped")
def test_on_the_cpu_device_offload_to_the_cpu_makes_no_sense() -> None:
    reasons = {rung.name: reason_of(rung, a_machine("cpu", nvme_path=Path("/nvme"))) for rung in RUNGS}
    assert {name for name, reason in reasons.items() if reason} == {name for name in reasons if "-cpu" in name}
    assert "in host memory already" in (reasons["zero2+opt-cpu"] or "")


@pytest.mark.usefixtures("well_equipped")
def test_the_nvme_rungs_need_a_path_and_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(reason_of(rung, a_machine(nvme_path=Path("/nvme"))) for rung in RUNGS)
    for rung in RUNGS:
        reason = reason_of(rung, a_machine())
        assert ("--nvme-path" in (reason or "")) == (reason is not None) == ("nvme" in rung.name)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert "libaio-dev" in (reason_of(RUNGS_BY_NAME["zero3+opt-nvme"], a_machine(nvme_path=Path("/nvme"))) or "")


@pytest.mark.usefixtures("well_equipped")
def test_without_a_compiler_only_rungs_that_need_an_operator_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    reasons = {rung.name: reason_of(rung, a_machine()) for rung in RUNGS}
    assert reasons["zero3"] is None
    assert "g++" in (reasons["zero2+opt-cpu"] or "")
    assert reason_of(RUNGS_BY_NAME["zero2+opt-cpu"], a_machine(), "sgd") is None, "torch's own steps there"


# Which GPUs a tune may take: those that nobody uses, as far as memory shows it.

GPU = Gpu("GPU-1", "NVIDIA A100", 80 * GIB)
NEEDED = 10 * GIB


@pytest.mark.parametrize(("share", "is_free"), [(0.0, True), (0.05, True), (0.2, False), (0.5, False)])
def test_a_gpu_that_holds_a_fifth_is_somebody_s_even_if_no_process_shows_and_enough_is_free(
    share: float, is_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a driver shows it inside a container."""
    used = int(share * GPU.total_bytes)
    info = SimpleNamespace(total=GPU.total_bytes, used=used, free=GPU.total_bytes - used)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByUUID", lambda uuid: "handle")
    monkeypatch.setattr("pynvml.nvmlDeviceGetMemoryInfo", lambda handle: info)
    monkeypatch.setattr(gpus_module, "users_of", lambda handle: [])
    found = obstacle(GPU, NEEDED)
    assert (found is None) is is_free
    assert found is None or "already holds" in found.sentence
